"""What a daemon has at its address: the lock, the two sockets that listen, and their files.

The sockets outlive a daemon that is followed by another, which finds them here. Their files may be
removed behind its back, and are made again. A worker has no address: of the two sockets it has the
one for lifelines alone, at a path of its own.
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
from stormd.errors import DirectoryUnsafe, remedy
from stormd.handover import CONTROL, LIFELINES, Handover
from stormd.protocol import lifeline_path, parse_address
from stormd.runtime_directory import AddressLock, grant, prepare_directory, remove_stale
from stormd.transport.control import ControlSocket
from stormd.transport.lifeline import LifelineListener, OnPiece, OnToken
from stormd.transport.listener import Listener

__all__ = ["Address"]

log = logging.getLogger(__name__)


class Address:
    """Of one daemon: `take` first, then the sockets, `close` behind the end of these.

    `worker_lifeline` is the path of a worker's lifelines, None where the address is its own.
    """

    def __init__(
        self, config: Config, handover: Handover | None, worker_lifeline: Path | None
    ) -> None:
        self._config = config
        self._handover = handover
        self._is_own = worker_lifeline is None
        self._socket: Final = parse_address(config.address)
        self.lifeline: Final = worker_lifeline or lifeline_path(self._socket)
        """Where lifelines connect."""
        self._lock: AddressLock | None = None
        self._left: dict[Path, socket.socket] = {}  # of an earlier daemon, and listening yet
        self._bound: dict[Path, Listener] = {}

    def take(self) -> None:
        """Have the address, and remove what nobody has there any more.

        Raises:
            StormdError: another has it, or its directory is of no use. `close` must follow.
        """
        if self._is_own:
            self._prepare_directory()
            self._lock = AddressLock(self._socket)
        for name, path in self._names.items():
            left = None if self._handover is None else self._handover.listening(name, path)
            if left is None:
                remove_stale(path)
            else:
                self._left[path] = left

    def bind_control(self, loop: asyncio.AbstractEventLoop) -> ControlSocket:
        """Return the control socket; a worker's has the connections alone that it is given.

        Raises:
            DirectoryUnsafe: it cannot be bound.
        """
        config, path = self._config, self._socket
        with _binding(path):
            control = ControlSocket(
                loop,
                config.address if self._is_own else None,
                held_most=config.message_bytes,
                listening=self._left.get(path),
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
            DirectoryUnsafe: it cannot be bound.
        """
        path = self.lifeline
        with _binding(path):
            lifelines = LifelineListener(
                loop,
                path,
                listening=self._left.get(path),
                on_token=on_token,
                on_piece=on_piece,
                on_lost=on_lost,
            )
        self._bound[path] = lifelines.listener
        return lifelines

    def open_to_users(self) -> None:
        """Let those who may connect do so, and have the manager keep what listens.

        Raises:
            DirectoryUnsafe: a file cannot be given to them.
        """
        for path in self._bound:
            self._grant(path)
        self._keep()

    def restore(self) -> None:
        """Bind again what was removed: nobody new would find this daemon, nor could start another.

        Raises:
            StormdError: another has the address by now, or it cannot be bound.
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
                self._left.pop(path, None)
        self._keep()
        log.warning("files of the address were removed: bound again")

    def close(self) -> None:
        """Give the address up. Twice is fine."""
        if self._lock is not None:
            self._lock.close()

    @property
    def _names(self) -> dict[str, Path]:
        """The files of the sockets, by what a manager calls these."""
        lifelines = {LIFELINES: self.lifeline}
        return {CONTROL: self._socket, **lifelines} if self._is_own else lifelines

    def _prepare_directory(self) -> None:
        config = self._config
        prepare_directory(
            self._socket.parent, socket_mode=config.socket_mode, group=config.socket_group
        )

    def _grant(self, path: Path) -> None:
        grant(path, self._config.socket_mode, self._config.socket_group)

    def _keep(self) -> None:
        if self._handover is not None:
            for name, path in self._names.items():
                if path not in self._left:
                    self._handover.keep_listening(name, self._bound[path].descriptor)


@contextmanager
def _binding(path: Path) -> Iterator[None]:
    """Tell of what the kernel says as the environment's fault, which it is."""
    try:
        yield
    except OSError as error:
        raise DirectoryUnsafe(
            f"{path} cannot be bound: {remedy(error, 'choose another --address')}"
        ) from error
