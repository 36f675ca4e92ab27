"""The lock, the two listening sockets and the socket files at a daemon's address.

The sockets outlive a daemon that has a successor, and the successor takes them over. If another
program removes the socket files, the daemon creates them again. A worker has no address: it has
only the socket for lifelines, at a path of its own.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stormd.config import Config
from stormd.errors import DirectoryUnsafe, error_with_remedy
from stormd.handover import CONTROL, LIFELINES, Handover
from stormd.protocol import lifeline_path, parse_address
from stormd.runtime_directory import (
    AddressLock,
    denied_users,
    grant,
    prepare_directory,
    remove_stale,
)
from stormd.transport.control import ControlSocket
from stormd.transport.lifeline import LifelineListener, OnPiece, OnToken
from stormd.transport.listener import Listener

__all__ = ["Address"]

log = logging.getLogger(__name__)


class Address:
    """The address of one daemon: first `take`, then bind the sockets, `close` after closing them.

    `worker_lifeline` is the path of a worker's lifelines; None if the daemon has its own address.
    """

    def __init__(
        self, config: Config, handover: Handover | None, worker_lifeline: Path | None
    ) -> None:
        self._config = config
        self._handover = handover
        self._is_own = worker_lifeline is None
        self._socket: Final = parse_address(config.address)
        self.lifeline: Final = worker_lifeline or lifeline_path(self._socket)
        """The path to which lifelines connect."""
        self._lock: AddressLock | None = None
        self._inherited: dict[Path, socket.socket] = {}  # from an earlier daemon, still listening
        self._bound: dict[Path, Listener] = {}

    def take(self) -> None:
        """Take the address's lock, and remove stale socket files.

        Raises:
            StormdError: another daemon has the address, or its directory cannot be used. The
                caller must still call `close`.
        """
        if self._is_own:
            self._prepare_directory()
            self._lock = AddressLock(self._socket)
        for name, path in self._names.items():
            left = None if self._handover is None else self._handover.listening(name, path)
            if left is None:
                remove_stale(path)
            else:
                self._inherited[path] = left

    def bind_control(self, loop: asyncio.AbstractEventLoop) -> ControlSocket:
        """Return the control socket; a worker's has only the connections that the front passes.

        Raises:
            DirectoryUnsafe: the socket cannot be bound.
        """
        config, path = self._config, self._socket
        with _binding(path):
            control = ControlSocket(
                loop,
                config.address if self._is_own else None,
                max_held_bytes=config.message_bytes,
                listening=self._inherited.get(path),
            )
        if control.listener is not None:
            self._bound[path] = control.listener
        return control

    def bind_lifelines(
        self,
        loop: asyncio.AbstractEventLoop,
        on_token: OnToken,
        on_piece: OnPiece,
        on_lost: Callable[[int], None],
    ) -> LifelineListener:
        """Return the socket of the lifelines.

        Raises:
            DirectoryUnsafe: the socket cannot be bound.
        """
        path = self.lifeline
        with _binding(path):
            lifelines = LifelineListener(
                loop,
                path,
                listening=self._inherited.get(path),
                on_token=on_token,
                on_piece=on_piece,
                on_lost=on_lost,
            )
        self._bound[path] = lifelines.listener
        return lifelines

    def open_to_users(self) -> None:
        """Give users access to the socket files, and have the service manager keep the sockets.

        Raises:
            DirectoryUnsafe: the group or mode of a file cannot be set.
        """
        for path in self._bound:
            self._grant(path)
        self._keep()

    def rebind(self) -> None:
        """Create removed files again.

        Without them, new clients could neither reach this daemon nor start another one.

        Raises:
            StormdError: another daemon has the address by now, or a socket cannot be bound.
        """
        is_locked = self._lock is None or self._lock.is_there
        if is_locked and all(one.is_bound for one in self._bound.values()):
            return
        if self._lock is not None:
            self._prepare_directory()
            self._lock.renew()
        for path, one in self._bound.items():
            if not one.is_bound:
                remove_stale(path)
                with _binding(path):
                    one.bind()
                self._grant(path)
                self._inherited.pop(path, None)
        self._keep()
        log.warning("files of the address were removed: bound again")

    def close(self) -> None:
        """Release the address's lock. Twice is fine."""
        if self._lock is not None:
            self._lock.close()

    @property
    def _names(self) -> dict[str, Path]:
        """The paths of the socket files, by the sockets' names at the service manager."""
        lifelines = {LIFELINES: self.lifeline}
        return {CONTROL: self._socket, **lifelines} if self._is_own else lifelines

    def _prepare_directory(self) -> None:
        config = self._config
        directory, mode, group = self._socket.parent, config.socket_mode, config.socket_group
        prepare_directory(directory, socket_mode=mode, group=group)
        denied = denied_users(directory, socket_mode=mode, group=group, uids=config.allowed_uids)
        if denied:
            log.warning("%s", denied)

    def _grant(self, path: Path) -> None:
        grant(path, self._config.socket_mode, self._config.socket_group)

    def _keep(self) -> None:
        if self._handover is not None:
            for name, path in self._names.items():
                if path not in self._inherited:
                    self._handover.keep(name, self._bound[path].descriptor)


@contextmanager
def _binding(path: Path) -> Iterator[None]:
    """Raise DirectoryUnsafe for an OSError: it is the environment's fault, not a bug."""
    try:
        yield
    except OSError as error:
        raise DirectoryUnsafe(
            f"{path} cannot be bound: {error_with_remedy(error, 'choose another --address')}"
        ) from error
