"""The directory that holds a daemon's sockets, and the lock that makes an address one daemon's.

Nobody but root and this user can put a socket of their own in the place of ours, and of all
daemons that want an address, the one that holds the lock has it. So a socket at an address whose
lock is free is left over from a dead daemon, and may be removed, if nobody has it open: another
program may, or a daemon whose lock was deleted by one that cleans directories.

A file's name is no proof that it is ours: what is removed at the end, or taken for there, is told
by its inode.
"""

from __future__ import annotations

import fcntl
import grp
import os
import shutil
import socket
import stat
from pathlib import Path

from stormd.errors import AddressInUse, DirectoryUnsafe, remedy

__all__ = [
    "AddressLock",
    "SocketFile",
    "check_directory",
    "grant",
    "prepare_directory",
    "remove_stale",
]


def prepare_directory(directory: Path, *, socket_mode: int, group: str) -> None:
    """Make sure of a safe directory for sockets; make it, 0700 or 0750 with a group, if missing.

    Raises:
        DirectoryUnsafe: it cannot be made, is no directory, is another user's, or others may
            write to it (and it is not sticky as /tmp is), but those of `group`.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        check_directory(directory, group)
        return
    except OSError as error:
        raise DirectoryUnsafe(
            f"the runtime directory {directory} cannot be made: "
            f"{remedy(error, 'make it, or choose another --address')}"
        ) from error
    grant(directory, 0o750 if socket_mode & 0o070 else 0o700, group)


def check_directory(directory: Path, group: str) -> None:
    """Make sure that nobody else can put a socket in the place of ours there.

    Raises:
        DirectoryUnsafe: it is no directory, is another user's, or others may write to it (and it
            is not sticky as /tmp is), but those of `group`, which is empty where none is let in.
    """
    try:
        found = directory.stat()
    except OSError as error:
        raise DirectoryUnsafe(f"the runtime directory {directory}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise DirectoryUnsafe(f"{directory} is no directory: choose another --address")
    if found.st_uid not in (0, os.getuid()):
        raise DirectoryUnsafe(
            f"the runtime directory {directory} belongs to user {found.st_uid}, not to root or "
            f"{os.getuid()}: choose another --address"
        )
    if found.st_mode & stat.S_ISVTX:
        return
    if found.st_mode & stat.S_IWOTH:
        raise DirectoryUnsafe(
            f"anyone may write to the runtime directory {directory}: run chmod o-w {directory}"
        )
    if found.st_mode & stat.S_IWGRP and found.st_gid != _group_id(group):
        raise DirectoryUnsafe(
            f"group {found.st_gid} may write to the runtime directory {directory}, and so put "
            f"another socket in the place of ours: run chmod g-w {directory}, or name that group "
            "as socket_group"
        )


def _group_id(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def grant(path: Path, mode: int, group: str) -> None:
    """Set permission bits and, where one is named, the group.

    Raises:
        DirectoryUnsafe: there is no such group, or this user may not give the file to it.
    """
    try:
        if group:
            shutil.chown(path, group=group)
        path.chmod(mode)
    except (OSError, LookupError) as error:
        raise DirectoryUnsafe(
            f"{path} cannot be given to group {group!r} with mode 0o{mode:o} ({error}): check "
            "socket_group and socket_mode"
        ) from error


def remove_stale(path: Path) -> None:
    """Remove what a dead daemon left at the path of a socket. The address's lock is held.

    What lies there and is none of that is left alone.

    Raises:
        DirectoryUnsafe: it is no socket.
        AddressInUse: a living process has it open.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise DirectoryUnsafe(f"{path} is no socket: remove it, or choose another --address")
        if _is_open(path):
            raise AddressInUse(
                f"a process that is no daemon with the lock {path}.lock has the socket {path}: end "
                "it, or choose another --address"
            )
        path.unlink()
    except FileNotFoundError:
        return


def _is_open(path: Path) -> bool:
    """Tell whether a living process has the socket open; of a dead one's the kernel refuses us."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, another type of socket: somebody is there
            return True
    return True


class SocketFile:
    """The file of a socket that this process has bound to `path`.

    Make it when the socket is bound, and use it no longer than the socket is open: the kernel gives
    the inode to no other file for so long.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made = path.lstat()

    @property
    def is_there(self) -> bool:
        """Whether the path is still this socket's, not removed or another's."""
        return _is(self._path, self._made)

    def remove(self) -> None:
        """Remove it, if it is there. Twice is fine."""
        if self.is_there:
            self._path.unlink(missing_ok=True)


class AddressLock:
    """Held from construction to `close`; the kernel lets go of it however the process ends.

    Raises:
        AddressInUse: a living daemon holds it.
    """

    def __init__(self, address: Path) -> None:
        self._address = address
        self._path = address.with_name(address.name + ".lock")
        self._descriptor = self._acquire(address)

    @property
    def is_there(self) -> bool:
        """Whether the lock's file is still the one that is held: another would not keep anyone out.

        False after `close`.
        """
        return self._descriptor >= 0 and _is(self._path, os.fstat(self._descriptor))

    def renew(self) -> None:
        """Hold the lock again whose file was removed.

        Raises:
            AddressInUse: another daemon holds it by now.
        """
        if not self.is_there:
            removed, self._descriptor = self._descriptor, self._acquire(self._address)
            os.close(removed)

    def close(self) -> None:
        """Remove the file, if it is there, and let go. Twice is fine."""
        if self._descriptor >= 0:
            if self.is_there:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _acquire(self, address: Path) -> int:
        """Lock the file that has the name after the lock is held: another may have removed it."""
        while True:
            descriptor = _locked(self._path, address)
            if _is(self._path, os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)  # its holder ended between our open and our lock: make a new one


def _is(path: Path, file: os.stat_result) -> bool:
    """Tell whether the path names that file."""
    try:
        return os.path.samestat(path.lstat(), file)
    except OSError:
        return False


def _locked(path: Path, address: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        advice = "choose another --address, or remove the lock that an ended daemon has left"
        raise DirectoryUnsafe(
            f"the lock {path} cannot be opened: {remedy(error, advice)}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AddressInUse(
            f"a daemon is running at ipc://{address}: use it, stop it, or choose another --address"
        ) from error
    return descriptor
