"""The clients that have a session, by session, by connection while heard, and once by token."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from stormd.lanes import Lane
from stormd.ledger.sessions import Session
from stormd.open_files import close_all
from stormd.protocol import Envelope, MapPiece
from stormd.transport.control import Connection

__all__ = ["Peer", "Peers"]


@dataclass(slots=True, eq=False, kw_only=True)
class Peer:
    """One client. `descriptors` is empty once they were sent; `outbox` has its unsent answers.

    `piece_descriptors` has descriptors that came over the lifeline before their MapPiece, by piece
    number. `pieces_waiting` has the requests that came before their descriptor.

    `is_live` is False once its session ends. A client that resumes another daemon's session has
    the session's lane in `resumes`, and a `lane` without a device. The real lane takes over once
    the lifeline has brought the shared descriptors.
    """

    record: Session
    connection: Connection
    lane: Lane
    token: bytes
    descriptors: tuple[int, ...] = ()
    outbox: list[Envelope] = field(default_factory=list)
    is_live: bool = True
    resumes: Lane | None = None
    piece_descriptors: dict[int, int] = field(default_factory=dict)
    pieces_waiting: dict[int, tuple[int, MapPiece]] = field(default_factory=dict)

    @property
    def session(self) -> int:
        """The id of its session."""
        return self.record.info.session

    def close_descriptors(self) -> None:
        """Close the descriptors that nobody has taken."""
        close_all((*self.descriptors, *self.piece_descriptors.values()))
        self.descriptors = ()
        self.piece_descriptors.clear()
        self.pieces_waiting.clear()


class Peers:
    """All clients. `by_connection` has those that are heard; callers only read both tables."""

    def __init__(self) -> None:
        self.by_session: dict[int, Peer] = {}
        self.by_connection: dict[Connection, Peer] = {}
        self._waiting: dict[int, Peer] = {}  # by session: no lifeline yet

    def add(self, peer: Peer) -> None:
        """Add a client that has no lifeline yet."""
        self.by_session[peer.session] = peer
        self.by_connection[peer.connection] = peer
        self._waiting[peer.session] = peer

    def add_of_worker(self, peer: Peer) -> None:
        """Add a client that another process serves."""
        self.by_session[peer.session] = peer

    def claim(self, token: bytes, uid: int) -> Peer | None:
        """Return the client whose lifeline this token and user open; each token works only once.

        Every waiting token is compared in constant time, so trying tokens reveals nothing.
        """
        found = None
        for peer in self._waiting.values():
            if hmac.compare_digest(peer.token, token) and peer.record.info.uid == uid:
                found = peer
        if found is not None:
            del self._waiting[found.session]
        return found

    def cut_off(self, peer: Peer) -> None:
        """Stop hearing and answering the client: its session is ending."""
        if self.by_connection.get(peer.connection) is peer:
            del self.by_connection[peer.connection]
        self._waiting.pop(peer.session, None)
        peer.outbox.clear()
        peer.is_live = False

    def remove(self, session: int) -> None:
        """Forget a client that was cut off and whose session is gone."""
        del self.by_session[session]
