"""Where a daemon's sockets are: addresses as text, and the places looked in by default.

An address is `ipc://` and an absolute path that fits a Unix socket name. The lifeline socket lies
beside the control socket, so one directory's permissions guard both.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from stormd.protocol.errors import ProtocolError

__all__ = [
    "SYSTEM_DIRECTORY",
    "accepts_connections",
    "default_addresses",
    "lifeline_path",
    "parse_address",
    "user_directory",
]

SYSTEM_DIRECTORY = Path("/run/stormd")
SOCKET_NAME = "stormd.sock"
CONNECT_SECONDS = 1.0

_MAX_PATH = 107 - len(".lifeline")
"""Bytes of sun_path without its final NUL, less the longer name that lies beside it."""


def parse_address(address: str) -> Path:
    """Return the socket path of `ipc:///PATH`.

    Raises:
        ProtocolError: another scheme, a relative path, a path too long for a Unix socket, or what
            is no text, such as a Path.
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


def accepts_connections(path: Path) -> bool:
    """Tell whether somebody listens at a socket's path, without speaking to them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_SECONDS)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def lifeline_path(control: Path) -> Path:
    """Return the path of the lifeline socket that belongs to a control socket."""
    return control.with_name(control.name + ".lifeline")


def user_directory(environ: Mapping[str, str], uid: int) -> Path:
    """Return the runtime directory of a user's own daemon."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "stormd" if base else Path("/tmp") / f"stormd-{uid}"  # noqa: S108 - 0700, owner checked by the daemon


def default_addresses(environ: Mapping[str, str], uid: int) -> list[str]:
    """Return the addresses to try when none is given, best first: system, then user."""
    return [
        f"ipc://{directory / SOCKET_NAME}"
        for directory in (SYSTEM_DIRECTORY, user_directory(environ, uid))
    ]
