"""Addresses: which are one, and where to look without one."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stormd.protocol import ProtocolError, default_addresses, lifeline_path, parse_address
from stormd.protocol.addresses import (
    SYSTEM_DIRECTORY,
    socket_trouble,
    temporary_directory,
    user_directory,
)


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


@pytest.mark.parametrize("runtime", ["/run/" + "x" * 80, "relative", "/run/a\n"])
def test_a_runtime_directory_that_no_socket_fits_into_is_passed_over(runtime: str) -> None:
    system, user = default_addresses({"XDG_RUNTIME_DIR": runtime}, 7)
    assert system == f"ipc://{SYSTEM_DIRECTORY}/stormd.sock"
    assert user == "ipc:///tmp/stormd-7/stormd.sock"


def test_a_temporary_directory_is_used_where_a_socket_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    assert temporary_directory("a/b.sock") == "/tmp"
    assert temporary_directory("b.sock") == "/" + "x" * 90


# --- who listens there ----------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A socket that somebody listens at."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        yield path


def test_a_listener_is_no_trouble_also_with_a_crowd_before_it(path: Path) -> None:
    assert socket_trouble(path) is None
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for caller in (first, second):
            caller.setblocking(False)
            try:
                caller.connect(str(path))
            except BlockingIOError:
                break
        assert socket_trouble(path) is None


def test_what_is_left_of_a_daemon_and_what_is_not_there_are_told_apart(tmp_path: Path) -> None:
    left = tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
    for path, reason in (
        (left, "refuses connections: the process that made it has ended"),
        (tmp_path / "none", "does not exist"),
        (left / "below", "does not exist"),
    ):
        trouble = socket_trouble(path)
        assert trouble is not None
        assert trouble.reason == f"{path} {reason}"
        assert f"stormd serve --address ipc://{path}" in trouble.advice
        assert not trouble.denies
