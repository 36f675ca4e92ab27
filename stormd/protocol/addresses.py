"""The addresses of a daemon's sockets: their text form and the default places.

An address is `ipc://` and an absolute path that fits a Unix socket name. The lifeline socket is in
the control socket's directory, so one directory's permissions guard both.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stormd.protocol.errors import ProtocolError

__all__ = [
    "DAEMON_UIDS_VARIABLE",
    "SYSTEM_DIRECTORY",
    "Credentials",
    "SocketTrouble",
    "accepts_connections",
    "default_addresses",
    "distrust",
    "lifeline_path",
    "parse_address",
    "peer_credentials",
    "socket_trouble",
    "temporary_directory",
    "user_directory",
    "worker_lifeline_path",
]

SYSTEM_DIRECTORY = Path("/run/stormd")
SOCKET_NAME = "stormd.sock"
CONNECT_SECONDS = 1.0

DAEMON_UIDS_VARIABLE = "STORMD_DAEMON_UIDS"
"""The variable that names further users whose daemons are trusted: numbers, comma-separated."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_SHORT = "/tmp"  # noqa: S108 - what a daemon uses there is 0700 and its own user's
"""The directory for sockets if the usual directory's name is too long."""

_MAX_PATH = 107 - len(".lifeline")
"""Bytes of sun_path without the final NUL, minus the suffix of the longer name beside it."""


def parse_address(address: str) -> Path:
    """Return the socket path of `ipc:///PATH`.

    Raises:
        ProtocolError: the address has another scheme, a relative path, unprintable characters or a
            path too long for a Unix socket, or is no str (a Path, for example).
    """
    if not isinstance(address, str):
        raise ProtocolError(f"address {address!r} is not a text of the form ipc:///PATH")
    scheme, separator, rest = address.partition("://")
    if scheme != "ipc" or not separator:
        raise ProtocolError(f"address {address!r} is not of the form ipc:///PATH")
    path = Path(rest)
    if not path.is_absolute() or path.name in ("", ".."):
        raise ProtocolError(f"address {address!r} needs an absolute path: ipc:///PATH")
    if not rest.isprintable():
        raise ProtocolError(f"address {address!r} has characters that cannot be printed")
    if len(str(path).encode()) > _MAX_PATH:
        raise ProtocolError(
            f"address {address!r} has {len(str(path).encode())} bytes of path; "
            f"a Unix socket takes at most {_MAX_PATH}: choose a shorter directory"
        )
    return path


@dataclass(frozen=True, slots=True)
class SocketTrouble:
    """Why no daemon can be used at a socket's path, and what to do about it, as two clauses.

    `denies` says that the file system denies this user access to a socket that exists, or may.
    """

    reason: str
    advice: str
    denies: bool = False

    def __str__(self) -> str:
        return self.reason


def socket_trouble(path: Path, environ: Mapping[str, str] = os.environ) -> SocketTrouble | None:
    """Return why no daemon can be used at a socket's path, or None if one can.

    Nothing is sent to the listener, who must be a trusted user: see `distrust`.
    """
    start = f"start one with `stormd serve --address ipc://{path}`"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(str(path))
            return distrust(path, peer_credentials(probe).uid, environ)
        except BlockingIOError:
            return _distrust_crowded(path, environ)
        except PermissionError:
            return _denial(path)
        except (FileNotFoundError, NotADirectoryError):
            return SocketTrouble(f"{path} does not exist", start)
        except ConnectionRefusedError:
            return _refusal(path, start)
        except OSError as error:
            return SocketTrouble(f"{path}: {error.strerror or error}", "choose another address")


def _refusal(path: Path, start: str) -> SocketTrouble:
    if not path.is_socket():
        return SocketTrouble(f"{path} is no socket", "choose another address")
    return SocketTrouble(f"{path} refuses connections: the process that made it has ended", start)


def _distrust_crowded(path: Path, environ: Mapping[str, str]) -> SocketTrouble | None:
    """Judge by the file's owner: the listener's backlog is full, so nobody can ask the kernel."""
    try:
        return distrust(path, path.lstat().st_uid, environ)
    except OSError as error:
        return SocketTrouble(f"{path}: {error.strerror}", "try again")


class Credentials(NamedTuple):
    """The owner of a process, as the kernel says; `pid` is 0 if it is in another namespace."""

    uid: int
    gid: int
    pid: int


def peer_credentials(line: socket.socket) -> Credentials:
    """Return who listened, or connected, at the other end of a Unix socket."""
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, gid = struct.unpack("iII", found)
    return Credentials(uid=uid, gid=gid, pid=pid)


def distrust(path: Path, uid: int, environ: Mapping[str, str] = os.environ) -> SocketTrouble | None:
    """Return why this user's daemon at a socket's path is not trusted, or None if it is.

    Trusted are root, this process's user, users named in STORMD_DAEMON_UIDS, and the owner of the
    socket's directory if nobody else could have put that directory there. So a user who makes a
    directory with a daemon's name in /tmp receives nothing from anybody.
    """
    if uid in (0, os.geteuid()) or uid == _owner(path.parent):
        return None
    named = environ.get(DAEMON_UIDS_VARIABLE, "")
    if str(uid) in (text.strip() for text in named.split(",")):
        return None
    return SocketTrouble(
        f"who listens at {path} is user {_user(uid)}, neither root nor user {_user(os.geteuid())}, "
        "in a directory that others could have made",
        f"if that daemon is meant, set {DAEMON_UIDS_VARIABLE}={uid}, else choose another address",
    )


def _owner(directory: Path) -> int | None:
    """Return a directory's owner if only that owner and root can have put the directory there."""
    try:
        place = directory.resolve(strict=True)
        owner = place.stat().st_uid
        above = [parent.stat() for parent in place.parents]
    except OSError:
        return None
    safe = all(one.st_uid in (0, owner) and not one.st_mode & _OTHERS_WRITE for one in above)
    return owner if safe else None


def accepts_connections(path: Path) -> bool:
    """Return whether a trusted daemon listens at a socket's path, without sending anything."""
    return socket_trouble(path) is None


def _denial(path: Path) -> SocketTrouble:
    """Return whose socket or directory denies this user access."""
    me = os.geteuid()
    for place in (path, *path.parents):
        try:
            found = place.stat()
        except OSError:
            continue  # behind a directory that this user may not look into
        kind = "directory" if stat.S_ISDIR(found.st_mode) else "socket"
        return SocketTrouble(
            f"permission denied for user {_user(me)}: the {kind} {place} belongs to user "
            f"{_user(found.st_uid)} and has mode {stat.S_IMODE(found.st_mode):04o}",
            f"ask user {_user(found.st_uid)} to let you in (allowed_uids, with socket_mode or "
            "socket_group)",
            denies=True,
        )
    raise AssertionError("the root directory can always be looked at")


def _user(uid: int) -> str:
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)


def lifeline_path(control: Path) -> Path:
    """Return the path of the lifeline socket beside a control socket."""
    return control.with_name(control.name + ".lifeline")


def worker_lifeline_path(control: Path, index: int) -> Path:
    """Return the path of a worker's lifeline socket; for an `index` below 100 it is no longer."""
    return control.with_name(f"{control.name}.line.{index}")


def user_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Return the runtime directory of a user's own daemon.

    Without XDG_RUNTIME_DIR, or if no socket's path fits into it, the directory is in /tmp.
    """
    base = environ.get("XDG_RUNTIME_DIR")
    if base and _fits(Path(base) / "stormd" / SOCKET_NAME):
        return Path(base) / "stormd"
    return Path(_SHORT) / f"stormd-{uid}"


def default_addresses(environ: Mapping[str, str], uid: int) -> list[str]:
    """Return the addresses to try if none is given, in this order: system, then user."""
    return [
        f"ipc://{directory / SOCKET_NAME}"
        for directory in (SYSTEM_DIRECTORY, user_directory(environ, uid))
    ]


def temporary_directory(socket_path: str) -> str:
    """Return the directory for temporary files, or /tmp if the socket's path does not fit there.

    `socket_path` is the socket's path relative to that directory, or a text of the same length.
    """
    chosen = tempfile.gettempdir()
    return chosen if _fits(Path(chosen) / socket_path) else _SHORT


def _fits(path: Path) -> bool:
    try:
        parse_address(f"ipc://{path}")
    except ProtocolError:
        return False
    return True
