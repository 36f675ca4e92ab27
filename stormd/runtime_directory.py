"""The directory of a daemon's sockets, and the lock that reserves an address for one daemon.

Only root and this user can replace our socket with another one. Of all daemons that want an
address, the one that holds the lock gets it. So a socket whose lock is free is left over from a
dead daemon, and may be removed if no process has it open. Another program may have it open, or a
daemon whose lock file was deleted by a program that cleans directories.

A file's name does not prove that the file is ours. So its inode decides whether a file still exists
or may be removed at the end.
"""

from __future__ import annotations

import fcntl
import grp
import os
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from stormd.errors import AddressInUse, DirectoryUnsafe, error_with_remedy

__all__ = [
    "AddressLock",
    "SocketFile",
    "check_directory",
    "denied_users",
    "grant",
    "prepare_directory",
    "remove_stale",
]


def prepare_directory(directory: Path, *, socket_mode: int, group: str) -> None:
    """Check the directory for sockets; create it if missing, 0700, or 0750 if a group is let in.

    Raises:
        DirectoryUnsafe: it cannot be created, is not a directory, or belongs to another user; or
            users outside `group` may write to it, and it is not sticky as /tmp is.
    """
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        check_directory(directory, group)
        return
    except OSError as error:
        raise DirectoryUnsafe(
            f"the runtime directory {directory} cannot be made: "
            f"{error_with_remedy(error, 'make it, or choose another --address')}"
        ) from error
    grant(directory, 0o750 if socket_mode & 0o070 else 0o700, group)


def check_directory(directory: Path, group: str) -> None:
    """Check that no other user can replace our socket in the directory.

    Raises:
        DirectoryUnsafe: it is not a directory, or belongs to another user; or users outside
            `group`, which may be empty, may write to it, and it is not sticky as /tmp is.
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


def denied_users(directory: Path, *, socket_mode: int, group: str, uids: Iterable[int]) -> str:
    """Return why users of `uids` cannot reach the sockets in the directory; empty if they can.

    Root and this user always can. The others come as the group of the sockets or as anybody.
    """
    others = sorted({*uids} - {0, os.getuid()})
    if not others:
        return ""
    names = ", ".join(map(str, others))
    if not socket_mode & 0o022:
        return (
            f"users {names} of allowed_uids may not open the sockets, of mode 0o{socket_mode:o}: "
            "set socket_mode=0o660, and have them join the group of the sockets, which "
            "socket_group names"
        )
    found = directory.stat()
    gid = _group_id(group) if group else os.getgid()
    if found.st_mode & stat.S_IXOTH or (found.st_mode & stat.S_IXGRP and found.st_gid == gid):
        return ""
    return (
        f"users {names} of allowed_uids may not enter the runtime directory {directory}, of group "
        f"{found.st_gid} and mode 0{stat.S_IMODE(found.st_mode):o}: run chgrp {group or gid} "
        f"{directory} and chmod g+x {directory}, or remove it for the daemon to make"
    )


def _group_id(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def grant(path: Path, mode: int, group: str) -> None:
    """Set permission bits and, if one is named, the group.

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
    """Remove the socket file that a dead daemon left at a path. The caller holds the lock.

    Any other file there is left alone.

    Raises:
        DirectoryUnsafe: there is a directory, or a file that is no socket.
        AddressInUse: a living process has the socket open.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            raise DirectoryUnsafe(
                f"{path} is a directory: name a socket in it, as in --address "
                f"ipc://{path}/stormd.sock"
            )
        if not stat.S_ISSOCK(mode):
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
    """Return whether a living process has the socket open; else the kernel refuses to connect."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue or another type of socket: a process has it open
            return True
    return True


class SocketFile:
    """The file of a socket that this process has bound to `path`.

    Create this object when the socket is bound, and use it only while the socket is open: for that
    time the kernel gives the inode to no other file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made = path.lstat()

    @property
    def is_there(self) -> bool:
        """Whether the path still names this socket's file, neither removed nor replaced."""
        return _is(self._path, self._made)

    def remove(self) -> None:
        """Remove the file, if it is still this socket's. Twice is fine."""
        if self.is_there:
            self._path.unlink(missing_ok=True)


class AddressLock:
    """Held from construction to `close`; the kernel releases it however the process ends.

    Raises:
        AddressInUse: a living daemon holds the lock.
        DirectoryUnsafe: the lock's file cannot be opened.
    """

    def __init__(self, address: Path) -> None:
        self._address = address
        self._path = address.with_name(address.name + ".lock")
        self._descriptor = self._acquire(address)

    @property
    def is_there(self) -> bool:
        """Whether the path still names the locked file; else the lock keeps no other daemon out.

        False after `close`.
        """
        return self._descriptor >= 0 and _is(self._path, os.fstat(self._descriptor))

    def renew(self) -> None:
        """Take the lock again, if its file was removed.

        Raises:
            AddressInUse: another daemon holds the lock by now.
        """
        if not self.is_there:
            removed, self._descriptor = self._descriptor, self._acquire(self._address)
            os.close(removed)

    def close(self) -> None:
        """Remove the lock's file, if it is still ours, and release the lock. Twice is fine."""
        if self._descriptor >= 0:
            if self.is_there:
                self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _acquire(self, address: Path) -> int:
        """Return the locked file that the path still names: another daemon may have removed it."""
        while True:
            descriptor = _locked(self._path, address)
            if _is(self._path, os.fstat(descriptor)):
                return descriptor
            os.close(descriptor)  # its holder ended between our open and our lock: make a new one


def _is(path: Path, file: os.stat_result) -> bool:
    """Return whether the path names that file."""
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
            f"the lock {path} cannot be opened: {error_with_remedy(error, advice)}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AddressInUse(
            f"a daemon is running at ipc://{address}: use it, stop it, or choose another --address"
        ) from error
    return descriptor
