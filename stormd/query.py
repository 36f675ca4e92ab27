"""Asks a daemon for its state, as `stormd status` and `stormd top` do.

A query needs no session and leaves nothing behind in the daemon. It ends within its timeout, with
the state or an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Self

import zmq

from stormd.errors import NoDaemon
from stormd.protocol import (
    Envelope,
    ProtocolError,
    Refused,
    Status,
    StatusRequest,
    decode,
    default_addresses,
    encode,
    parse_address,
    socket_trouble,
)

__all__ = ["ADDRESS_VARIABLE", "StatusQuery", "find_address"]

ADDRESS_VARIABLE: Final = "STORMD_ADDRESS"

DEFAULT_TIMEOUT: Final = 2.0
"""Seconds to wait for an answer; a daemon answers within milliseconds."""


def find_address(address: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Return the address given, else STORMD_ADDRESS, else the first default that listens.

    Raises:
        NoDaemon: no daemon that this user can reach listens at a default address.
        ProtocolError: the address is malformed.
    """
    environ = os.environ if environ is None else environ
    named = address or environ.get(ADDRESS_VARIABLE)
    if named:
        parse_address(named)
        return named
    places = default_addresses(environ, os.getuid())
    troubles = [socket_trouble(parse_address(place)) for place in places]
    for place, trouble in zip(places, troubles, strict=True):
        if trouble is None:
            return place
    looked = " or ".join(f"{place} ({why})" for place, why in zip(places, troubles, strict=True))
    raise NoDaemon(
        f"no daemon at {looked}: start one with `stormd serve`, or name its socket with --address "
        "or STORMD_ADDRESS"
    )


class StatusQuery:
    """A connection that asks one daemon for its state, as often as wanted.

    A context manager. `timeout` is the seconds that one query may take.
    """

    def __init__(self, address: str, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.address = address
        self._timeout = timeout
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._asked = 0

    def ask(self) -> dict[str, Any]:
        """Return the daemon's state.

        Raises:
            NoDaemon: there is no answer within the timeout, a refusal, or one that is not valid.
        """
        trouble = socket_trouble(parse_address(self.address))
        if trouble is not None:
            raise NoDaemon(
                f"no daemon to be asked at {self.address} ({trouble}): {trouble.advice}, or name "
                "the socket of the one that runs"
            )
        self._asked += 1
        self._socket.send(encode([Envelope(self._asked, StatusRequest())]))
        while self._socket.poll(int(self._timeout * 1000)):
            state = self._answer(self._socket.recv())
            if state is not None:
                return state
        raise NoDaemon(
            f"no daemon answers at {self.address} within {self._timeout:g} s: "
            "is it running, and may this user connect?"
        )

    def _answer(self, frame: bytes) -> dict[str, Any] | None:
        """Return the state if the frame answers the last query, None if it answers an older one."""
        try:
            batch = decode(frame)
        except ProtocolError as error:
            raise NoDaemon(f"{self.address} answers in another protocol: {error}") from error
        for request, message in batch:
            if request == self._asked and isinstance(message, Status):
                return message.state
            if request == self._asked and isinstance(message, Refused):
                raise NoDaemon(f"{self.address} refuses: {message.detail}")
        return None

    def close(self) -> None:
        """Close the connection. Twice is fine."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
