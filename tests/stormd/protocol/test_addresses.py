"""Addresses: which are one, and where to look without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stormd.protocol import ProtocolError, default_addresses, lifeline_path, parse_address
from stormd.protocol.addresses import user_directory


def test_an_address_is_ipc_and_an_absolute_path() -> None:
    assert parse_address("ipc:///run/stormd/stormd.sock") == Path("/run/stormd/stormd.sock")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/run/s",
        "tcp://127.0.0.1:5",
        "ipc://",
        "ipc://relative/s",
        "ipc:///",
        "ipc:///a/..",
        "ipc:///a\0b",
        "ipc:///\udcff",
    ],
)
def test_what_is_none_is_named(address: str) -> None:
    with pytest.raises(ProtocolError, match="address"):
        parse_address(address)


@pytest.mark.parametrize("address", [Path("/run/s"), b"ipc:///run/s", 5])
def test_what_is_no_text_is_named(address: Any) -> None:
    with pytest.raises(ProtocolError, match=r"is not a text of the form ipc:///PATH"):
        parse_address(address)


def test_a_path_must_fit_a_socket_with_its_lifeline() -> None:
    longest = "/" + "x" * 97
    assert len(str(lifeline_path(parse_address(f"ipc://{longest}")))) == 107
    with pytest.raises(ProtocolError, match="at most 98"):
        parse_address(f"ipc://{longest}x")


def test_the_lifeline_lies_beside_the_control_socket() -> None:
    assert lifeline_path(Path("/run/a/s")) == Path("/run/a/s.lifeline")


def test_the_systems_daemon_comes_before_the_users() -> None:
    assert default_addresses({"XDG_RUNTIME_DIR": "/run/user/7"}, 7) == [
        "ipc:///run/stormd/stormd.sock",
        "ipc:///run/user/7/stormd/stormd.sock",
    ]
    assert user_directory({}, 7) == Path("/tmp/stormd-7")
