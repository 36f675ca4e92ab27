"""The clients of the open sessions: how each is reached, and what waits to be sent to it.

What stays true: a session has one routing id, which ZeroMQ gave it and no other peer can take;
its token opens one lifeline, once.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from stormd.lanes import Lane
from stormd.protocol import Envelope

__all__ = ["Credentials", "Peer", "Peers"]


class Credentials(NamedTuple):
    """Whose process it is, as the kernel says; `pid` 0 where it is of another namespace."""

    uid: int
    gid: int
    pid: int


@dataclass(slots=True, eq=False)
class Peer:
    """One client. `descriptors` are empty once they were handed over; `outbox` is unsent."""

    session: int
    route: bytes
    credentials: Credentials
    lane: Lane
    token: bytes
    descriptors: tuple[int, ...]
    outbox: list[Envelope] = field(default_factory=list)


class Peers:
    """All clients, by session and, until they are cut off, by route."""

    def __init__(self) -> None:
        self._by_session: dict[int, Peer] = {}
        self._by_route: dict[bytes, Peer] = {}
        self._waiting: dict[int, Peer] = {}  # by session: no lifeline yet

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_session.values()))

    def add(self, peer: Peer) -> None:
        """Add a client that has no lifeline yet."""
        self._by_session[peer.session] = peer
        self._by_route[peer.route] = peer
        self._waiting[peer.session] = peer

    def at(self, route: bytes) -> Peer | None:
        """Return the client that speaks from this route, if it has a session."""
        return self._by_route.get(route)

    def of(self, session: int) -> Peer:
        """Return a session's client."""
        return self._by_session[session]

    def claim(self, token: bytes, uid: int) -> Peer | None:
        """Return the client whose lifeline this token and user open; each only once.

        Every waiting token is compared, in constant time, so that nothing is learned by trying.
        """
        found = None
        for peer in self._waiting.values():
            if hmac.compare_digest(peer.token, token) and peer.credentials.uid == uid:
                found = peer
        if found is not None:
            del self._waiting[found.session]
        return found

    def cut_off(self, peer: Peer) -> None:
        """Neither hear nor answer the client any more; its session is ending."""
        if self._by_route.get(peer.route) is peer:
            del self._by_route[peer.route]
        self._waiting.pop(peer.session, None)
        peer.outbox.clear()

    def remove(self, session: int) -> None:
        """Forget a client that was cut off and whose session is gone."""
        del self._by_session[session]
