"""Addresses: which are one, and where to look without one."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from support.other_user import ANOTHER_UID, listening_impostor, root_only

from stormd.protocol import ProtocolError, default_addresses, lifeline_path, parse_address
from stormd.protocol.addresses import (
    DAEMON_UIDS_VARIABLE,
    SYSTEM_DIRECTORY,
    distrust,
    peer_credentials,
    socket_trouble,
    temporary_directory,
    user_directory,
)


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
        assert trouble.reason == f"{path} {reason}"
        assert f"stormd serve --address ipc://{path}" in trouble.advice
        assert not trouble.denies


def test_what_is_no_socket_is_none_of_a_daemon(tmp_path: Path) -> None:
    trouble = socket_trouble(tmp_path)
    assert f"{trouble}: {trouble.advice}" == f"{tmp_path} is no socket: choose another address"


# --- whose it must be -----------------------------------------------------------------------


@pytest.fixture
def impostor() -> Iterator[Path]:
    with listening_impostor() as (path, _):
        yield path


@root_only
def test_another_users_socket_where_anybody_may_put_one_is_not_spoken_to(impostor: Path) -> None:
    trouble = socket_trouble(impostor, {})
    assert f"user {ANOTHER_UID} " in trouble.reason
    assert f"set {DAEMON_UIDS_VARIABLE}={ANOTHER_UID}" in trouble.advice
    assert socket_trouble(impostor, {DAEMON_UIDS_VARIABLE: f"7, {ANOTHER_UID}"}) is None
    assert socket_trouble(impostor, {DAEMON_UIDS_VARIABLE: "7"}) is not None
    with ExitStack() as crowd:  # which nobody takes, so that nobody can be asked
        for _ in range(3):
            caller = crowd.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with suppress(BlockingIOError):
                caller.connect(str(impostor))
        assert socket_trouble(impostor, {}) is not None


@root_only
def test_a_directory_that_only_root_can_have_given_away_speaks_for_its_owner() -> None:
    """As the system's does: /run/stormd, of user stormd. What lies in /tmp could be anybody's."""
    with tempfile.TemporaryDirectory(dir="/run", prefix="stormd-test-") as name:
        directory = Path(name)
        os.chown(directory, ANOTHER_UID, ANOTHER_UID)
        path = directory / "s"
        assert distrust(path, ANOTHER_UID, {}) is None
        assert distrust(path, ANOTHER_UID - 1, {}) is not None
        below = directory / "below"
        below.mkdir()
        os.chown(below, ANOTHER_UID - 1, ANOTHER_UID)
        assert distrust(below / "s", ANOTHER_UID - 1, {}) is not None, "its owner's may move it"
        os.chown(below, ANOTHER_UID, ANOTHER_UID)
        assert distrust(below / "s", ANOTHER_UID, {}) is None
        directory.chmod(0o770)
        assert distrust(below / "s", ANOTHER_UID, {}) is not None
    assert distrust(Path("/no/such/s"), ANOTHER_UID, {}) is not None


def test_a_daemon_of_this_user_or_of_root_is_spoken_to(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        assert peer_credentials(caller).uid == os.geteuid()
    for uid in (0, os.geteuid()):
        assert distrust(path, uid, {}) is None
