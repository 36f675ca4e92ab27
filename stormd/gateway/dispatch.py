"""Carries out the ledger's instructions: sends jobs to lanes and answers to clients, ends sessions.

Answers of one turn of the loop are sent in one frame. Answers that may wait are sent with the next
ones, within milliseconds. A client that misses an answer would wait forever, so its session ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from stormd.gateway.peers import Peer, Peers
from stormd.ledger.events import (
    Detach,
    Ended,
    Instruction,
    Jobs,
    Map,
    Probe,
    Recorded,
    Reply,
    Result,
    Skip,
    SpillJob,
    Unmap,
)
from stormd.ledger.ledger import Ledger
from stormd.ledger.sessions import session_name
from stormd.monitoring.counters import Counters
from stormd.protocol import (
    Admitted,
    CacheNames,
    Envelope,
    MapPiece,
    Message,
    Pong,
    Refused,
    Stored,
    StoredParts,
    encode,
    pack,
)
from stormd.transport.control import ControlSocket
from stormd.transport.lifeline import LifelineListener

__all__ = ["MESSAGES_A_FRAME", "Dispatch", "Later", "Move", "OnSession", "joined"]

log = logging.getLogger(__name__)

MESSAGES_A_FRAME: Final = 512
"""Maximum answers in one frame: far below a frame's capacity, whatever texts they contain."""

HELD_SECONDS: Final = 0.005
"""Maximum time that Admitted is held back to be sent with Stored. Each frame wakes a ZeroMQ thread
here and one in the client."""

UNREAD_BYTES: Final = 8 << 20
"""Maximum bytes of answers that the kernel has not accepted; beyond it the peer's session ends. The
answers to all stores of a session with 60,000 entries are a third of it. Less would be too little:
on a busy machine a client may be unable to read for as long as hundreds of frames take."""

REASONS: Final = {
    "unreachable": "its answers could not be sent",
    "failed": "an error in the daemon",
}
"""What a client is told, by the cause for which its session ends while the daemon runs on."""

_alike = attrgetter("session", "__class__")

Move = Callable[[Sequence[SpillJob]], None]
"""Has the tier on disk begin these jobs."""

Later = Callable[[float, Callable[[], None]], asyncio.TimerHandle]
"""Schedules a call on the loop after so many seconds."""

OnSession = Callable[[int, str], None]
"""Takes a session and its new state: `ATTACHED`, or the cause of its end."""


class Dispatch:
    """Performs instructions and sends answers; `flush` must follow at the end of any event.

    The control socket calls `flush` after a turn if there is something to send.

    `flush` calls `on_progress` if the holdings have changed, and `move`, which must be given if the
    ledger has a tier on disk, if that has jobs to begin. `on_session` is told of each session whose
    lifeline is connected, and of each that is gone, and why.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        counters: Counters,
        control: ControlSocket,
        on_progress: Callable[[], None],
        later: Later,
        on_session: OnSession | None = None,
        move: Move | None = None,
    ) -> None:
        self.peers = Peers()
        self.ledger = ledger
        self.counters = counters
        self.control = control
        self._on_progress = on_progress
        self._later = later
        self._move = move
        self.on_session: OnSession = on_session or (lambda *_: None)
        self._lifelines: LifelineListener
        self._unsent: dict[Peer, None] = {}  # peers whose outbox must be sent, in order
        self._may_wait: dict[Peer, None] = {}  # peers whose outbox may wait
        self._send_timer: asyncio.TimerHandle | None = None
        self._free_timer: asyncio.TimerHandle | None = None
        self._handlers: dict[type[Instruction], Callable[[Peer, Any], None]] = {
            Skip: lambda peer, skip: peer.lane.skip_sequence(skip.session, skip.sequence),
            Recorded: lambda peer, made: peer.lane.recorded(made.session, made.sequences),
            Map: self._map,
            Unmap: lambda peer, made: peer.lane.unmap_segment(made.session, made.segment),
            Probe: self._probe,
            Detach: self._detach,
            Ended: self._ended,
        }

    def start(self, lifelines: LifelineListener) -> None:
        """Set the lifelines, which are closed when their sessions end."""
        self._lifelines = lifelines

    # --- instructions -----------------------------------------------------------------------

    def perform(self, instructions: list[Instruction]) -> None:
        """Carry instructions out, in their order."""
        peers = self.peers.by_session
        # Any event may give the tier on disk something to move. A daemon that is ending waits for
        # entries to be freed, which has no answer. Both need a flush.
        if self._move is not None or self.ledger.is_draining:
            self.control.has_unsent_answers = True
        for instruction in instructions:
            peer = peers[instruction.session]
            if isinstance(instruction, Jobs):
                done = peer.lane.begin(instruction.session, instruction.jobs)
                if done:
                    self._handle_results(done)
            elif isinstance(instruction, Reply):
                self.send(peer, instruction.request, instruction.message)
            else:
                self._handlers[type(instruction)](peer, instruction)

    def _map(self, peer: Peer, made: Map) -> None:
        descriptor = -1
        if isinstance(made.segment, MapPiece):
            descriptor = peer.piece_descriptors.pop(made.segment.segment)
        peer.lane.map_segment(made.session, made.segment, descriptor)

    def _probe(self, peer: Peer, _probe: Probe) -> None:
        """Send a Pong that the client has not asked for, to see whether it is reachable."""
        self.send_pong(peer, 0)

    def send_pong(self, peer: Peer, request: int) -> None:
        """Tell a client how fast its bytes are transferred."""
        spills, speeds = self.ledger.spills, peer.lane.speeds(peer.session)
        disk = 0 if spills is None else spills.bytes_per_second
        self.send(peer, request, Pong(**speeds._asdict(), disk=disk))

    def _detach(self, peer: Peer, detach: Detach) -> None:
        self._cut_off(peer)
        self.control.session_ended(peer.connection)
        peer.lane.detach(detach.session)

    def _cut_off(self, peer: Peer) -> None:
        """Neither hear nor answer a client any more, and drop what waits for it."""
        self.peers.cut_off(peer)
        peer.close_descriptors()
        self._unsent.pop(peer, None)
        self._may_wait.pop(peer, None)

    def _ended(self, _peer: Peer, ended: Ended) -> None:
        self.peers.remove(ended.session)
        self.on_session(ended.session, ended.cause)  # before its client learns of it
        self._lifelines.end(ended.session, REASONS.get(ended.cause, ""))
        fields = {"session": session_name(ended.session), "cause": ended.cause}
        log.info("session ended", extra=fields)

    def drop_connection(self, peer: Peer) -> None:
        """Drop a client's connection but not its session: it has connected again elsewhere."""
        self._cut_off(peer)
        self.control.close_connection(peer.connection)

    # --- results ----------------------------------------------------------------------------

    def take_results(self, results: Sequence[Result]) -> None:
        """Take in the results of lanes."""
        self._handle_results(results)
        self.flush()

    def _handle_results(self, results: Sequence[Result]) -> None:
        now, peers = time.monotonic(), self.peers.by_session
        is_waited_for = self.ledger.is_waited_for
        for (session, kind), alike in groupby(results, _alike):
            try:
                self.perform(self.ledger.on_results[kind](peers[session].record, alike, now))
            except Exception:
                # Our bug. Only this session ends; its end never receives these results.
                log.exception("results of session %s could not be handled", session_name(session))
                self.end(session, "failed")
        if is_waited_for:
            self.control.unpark()

    def suspend(self) -> None:
        """Cancel all scheduled work: another daemon takes the sessions over."""
        for timer in (self._send_timer, self._free_timer):
            if timer is not None:
                timer.cancel()

    # --- the ends of sessions ---------------------------------------------------------------

    def end(self, session: int, cause: str) -> None:
        """Begin a session's end."""
        self.perform(self.ledger.leases.end(session, cause))
        self.schedule_freeing()

    def end_unreachable(self, peer: Peer, reason: str) -> None:
        """End the session of a peer that has missed answers and would wait for them forever.

        Its connection is closed as well: the peer must not decide how long unsent bytes are kept.
        """
        self.counters.unsent += 1
        fields = {"session": session_name(peer.session), "reason": reason}
        log.info("answers cannot be sent", extra=fields)
        self.control.close_connection(peer.connection)
        self.end(peer.session, "unreachable")

    def schedule_freeing(self) -> None:
        """Schedule more freeing of entries of ended sessions, after the loop's other events."""
        if self._free_timer is None and self.ledger.leases.is_freeing:
            self._free_timer = self._later(0.0, self._free_some)

    def _free_some(self) -> None:
        self._free_timer = None
        self.perform(self.ledger.leases.free_some())
        self.schedule_freeing()
        self.flush()

    # --- answers ----------------------------------------------------------------------------

    def send(self, peer: Peer, request: int, message: Message) -> None:
        """Put an answer into the peer's outbox."""
        kind = type(message)
        if kind is CacheNames:
            self.send_alone(peer, request, message)
            return
        peer.outbox.append(Envelope(request, message))
        if kind is not Admitted or len(peer.outbox) >= MESSAGES_A_FRAME:
            self.send_soon(peer)
            self.counters.refused += kind is Refused
            return
        self._may_wait[peer] = None
        if self._send_timer is None:
            self._send_timer = self._later(HELD_SECONDS, self._send_waiting)

    def send_soon(self, peer: Peer) -> None:
        """Have the next `flush` send the peer's outbox."""
        self._unsent[peer] = None
        self.control.has_unsent_answers = True

    def send_alone(self, peer: Peer, request: int, message: Message) -> None:
        """Send a message at once in its own frame: a large one might not fit beside others."""
        self.control.send(peer.connection, encode([Envelope(request, message)]))
        self._end_if_unreachable(peer)

    def flush(self) -> None:
        """Send all outboxes that must be sent, and have the tier on disk begin what is due."""
        self.control.has_unsent_answers = False
        if self._move is not None and self.ledger.spills is not None:
            jobs = self.ledger.spills.moves(time.monotonic())
            if jobs:
                self._move(jobs)
        while self._unsent:
            peer = next(iter(self._unsent))
            del self._unsent[peer]
            self.send_outbox(peer)
        holdings = self.ledger.holdings
        if holdings.has_changed:
            holdings.has_changed = False
            self._on_progress()

    def send_outbox(self, peer: Peer) -> None:
        """Send a peer's outbox now."""
        self._may_wait.pop(peer, None)
        outbox, peer.outbox = peer.outbox, []
        connection = peer.connection
        for start in range(0, len(outbox), MESSAGES_A_FRAME):
            if not peer.is_live:
                return  # the peer was given up
            answers = joined(outbox[start : start + MESSAGES_A_FRAME])
            self.control.send(connection, encode(answers))
            if connection.unsent or not connection.is_reachable:
                self._end_if_unreachable(peer)

    def _send_waiting(self) -> None:
        self._send_timer = None
        self._unsent |= self._may_wait
        self.flush()

    def _end_if_unreachable(self, peer: Peer) -> None:
        """End a peer's session if the peer is gone or reads too little."""
        if not peer.connection.is_reachable:
            self.end_unreachable(peer, "it is gone")
        elif peer.connection.unsent > UNREAD_BYTES:
            self.end_unreachable(peer, "it does not read")


def joined(answers: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return the answers for one frame, without an Admitted whose Stored is among them.

    Neighbouring Stored of the same mode are joined into one StoredParts.
    """
    stored = {message.entry for _, message in answers if type(message) is Stored}
    if not stored:
        return answers
    made: list[Envelope] = []
    run: list[Stored] = []
    for answer in answers:
        message = answer.message
        if type(message) is Stored:
            if run and run[0].mode != message.mode:
                made.append(_joined(run))
                run = []
            run.append(message)
        elif type(message) is not Admitted or message.entry not in stored:
            if run:
                made.append(_joined(run))
                run = []
            made.append(answer)
    if run:
        made.append(_joined(run))
    return made


def _joined(run: Sequence[Stored]) -> Envelope:
    if len(run) == 1:
        return Envelope(0, run[0])
    numbers = [number for one in run for number in (one.entry, one.stored_bytes)]
    return Envelope(0, StoredParts(pack(numbers), run[0].mode))
