"""The runtime directory: nobody else's, and one daemon's an address."""

from __future__ import annotations

import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from stormd.errors import AddressInUse, DirectoryUnsafe
from stormd.runtime_directory import (
    AddressLock,
    SocketFile,
    denied_users,
    grant,
    prepare_directory,
    remove_stale,
)


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    for socket_mode, expected in ((0o600, 0o700), (0o660, 0o750)):
        directory = tmp_path / f"{socket_mode}" / "b"
        prepare_directory(directory, socket_mode=socket_mode, group="")
        assert stat.S_IMODE(directory.stat().st_mode) == expected


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another group")
def test_a_directory_that_anyone_or_a_group_may_write_to_is_refused_unless_it_is_let_in(
    tmp_path: Path,
) -> None:
    """Its members could remove our socket and put one of theirs there."""
    for mode in (0o755, 0o1777):
        tmp_path.chmod(mode)
        prepare_directory(tmp_path, socket_mode=0o600, group="")
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    tmp_path.chmod(0o777)
    with pytest.raises(DirectoryUnsafe, match="chmod o-w"):
        prepare_directory(tmp_path, socket_mode=0o600, group="")
    nogroup, other = (grp.getgrnam(name) for name in ("nogroup", "daemon"))
    os.chown(tmp_path, 0, nogroup.gr_gid)
    tmp_path.chmod(0o775)
    for group in ("", other.gr_name, "no-such-group"):
        with pytest.raises(DirectoryUnsafe, match=rf"group {nogroup.gr_gid} may write.*chmod g-w"):
            prepare_directory(tmp_path, socket_mode=0o600, group=group)
    prepare_directory(tmp_path, socket_mode=0o600, group=nogroup.gr_name)
    tmp_path.chmod(0o1775)
    prepare_directory(tmp_path, socket_mode=0o600, group="")


def test_users_whom_sockets_or_directory_keep_out_are_named_with_the_next_step(
    tmp_path: Path,
) -> None:
    """A directory that an earlier daemon made for itself alone stays as it is."""

    def denied(mode: int, uids: tuple[int, ...] = (4242,), group: str = "") -> str:
        return denied_users(tmp_path, socket_mode=mode, group=group, uids=uids)

    tmp_path.chmod(0o700)
    assert denied(0o600, ()) == denied(0o600, (0, os.getuid())) == ""
    assert "users 4242 of allowed_uids may not open the sockets, of mode 0o600" in denied(0o600)
    for group in ("", grp.getgrgid(os.getgid()).gr_name):
        tmp_path.chmod(0o700)
        assert f"chmod g+x {tmp_path}" in denied(0o660, group=group)
        tmp_path.chmod(0o710)
        assert denied(0o660, group=group) == ""
        assert f"run chgrp daemon {tmp_path}" in denied(0o660, group="daemon")
    tmp_path.chmod(0o701)
    assert denied(0o660, group="daemon") == ""


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir()
    if os.getuid() == 0:
        os.chown(directory, 4242, 4242)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(DirectoryUnsafe, match="belongs to user"):
        prepare_directory(directory, socket_mode=0o600, group="")


def test_a_file_is_no_directory_and_an_unknown_group_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryUnsafe, match="no directory"):
        prepare_directory(tmp_path / "file", socket_mode=0o600, group="")
    with pytest.raises(DirectoryUnsafe, match="cannot be made"):
        prepare_directory(tmp_path / "file" / "below", socket_mode=0o600, group="")
    with pytest.raises(DirectoryUnsafe, match="no-such-group"):
        grant(tmp_path, 0o700, "no-such-group")


def test_only_sockets_are_removed(tmp_path: Path) -> None:
    remove_stale(tmp_path / "absent")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / "s"))
    remove_stale(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DirectoryUnsafe, match="is no socket"):
        remove_stale(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").exists()


def test_a_directory_is_no_address_and_is_not_to_be_removed(tmp_path: Path) -> None:
    with pytest.raises(DirectoryUnsafe, match=f"as in --address ipc://{tmp_path}/stormd.sock"):
        remove_stale(tmp_path)


def test_a_socket_that_somebody_has_open_is_left_alone(tmp_path: Path) -> None:
    """The operator may have named another program's, or a daemon's lock may have been deleted."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as theirs:
            theirs.bind(str(tmp_path / "s"))
            if kind is socket.SOCK_STREAM:
                theirs.listen()
            with pytest.raises(AddressInUse, match=f"has the socket {tmp_path}/s: end it, or"):
                remove_stale(tmp_path / "s")
            assert (tmp_path / "s").exists()
        remove_stale(tmp_path / "s")


def test_one_holds_the_lock_until_it_closes(tmp_path: Path) -> None:
    first = AddressLock(tmp_path / "s")
    with pytest.raises(AddressInUse, match=f"ipc://{tmp_path}/s"):
        AddressLock(tmp_path / "s")
    AddressLock(tmp_path / "other").close()
    first.close()
    first.close()
    AddressLock(tmp_path / "s").close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_removed_is_held_again_unless_another_holds_it(
    tmp_path: Path,
) -> None:
    lock = AddressLock(tmp_path / "s")
    assert lock.is_there
    (tmp_path / "s.lock").unlink()
    assert not lock.is_there
    lock.renew()
    assert lock.is_there
    (tmp_path / "s.lock").unlink()
    other = AddressLock(tmp_path / "s")
    with pytest.raises(AddressInUse):
        lock.renew()
    lock.close()
    assert not lock.is_there
    assert other.is_there, "the file was the other's"
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_took_the_place_of_ours_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as theirs:
        ours.bind(str(path))
        file = SocketFile(path)
        assert file.is_there
        path.unlink()
        assert not file.is_there
        file.remove()
        theirs.bind(str(path))
        assert not file.is_there
        file.remove()
        assert path.exists()
        SocketFile(path).remove()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_while_we_waited_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our lock its holder may end and remove the file we have opened."""
    import stormd.runtime_directory as module

    holder = AddressLock(tmp_path / "s")
    locked = module._locked
    calls: list[int] = []

    def locked_too_late(path: Path, socket: Path) -> int:
        if not calls:
            descriptor = os.open(path, os.O_RDWR)
            holder.close()
        else:
            descriptor = locked(path, socket)
        calls.append(descriptor)
        return descriptor

    monkeypatch.setattr(module, "_locked", locked_too_late)
    lock = AddressLock(tmp_path / "s")
    assert len(calls) == 2
    lock.close()
