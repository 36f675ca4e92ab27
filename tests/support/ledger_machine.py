"""The ledger under events in any order, as a state machine that others add to."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.ledger_bench import CAPACITY, KIB, LIMITS, LedgerBench

from stormd.ledger import leases
from stormd.ledger.chunks import blob_bound
from stormd.ledger.sessions import Limits
from stormd.memory.arena import granules
from stormd.protocol import Admitted, MapPiece, Message, Rejected, ReserveRange

__all__ = ["LedgerMachine", "SharingMachine"]


class LedgerMachine(RuleBasedStateMachine):
    """Three sessions that do anything in any order, over a lane that answers at any time."""

    limits: Limits = LIMITS
    committed: int | None = None
    answers: tuple[type[Message], ...] = (Admitted, Rejected)
    """To a store, whose number may be that of an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.bench()
        self.made.on_wait = self.come
        self.next_session = 1
        self.next_entry = 1
        self.next_ticket = 1
        self.freed_a_turn = leases.FREED_A_TURN
        leases.FREED_A_TURN = 2  # so that sessions end while others go on

    def bench(self) -> LedgerBench:
        """Return what is tried."""
        return LedgerBench(self.limits, committed=self.committed)

    def come(self) -> None:
        """Let some memory come that somebody waits for."""
        space = self.made.space
        assert space.use().ready < space.wanted <= CAPACITY
        space.grow(min(4 * KIB, CAPACITY - space.committed))
        self.made.ledger.assert_invariants()

    @property
    def living(self) -> list[int]:
        return [one for one in self.made.ledger.sessions if one not in self.made.lane.detaching]

    @precondition(lambda self: self.made.ledger.leases.refusal(self.next_session % 2) is None)
    @rule(attach=st.booleans())
    def open(self, attach: bool) -> None:
        self.made.open(self.next_session, attach=attach)
        self.next_session += 1

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 10 * KIB))
    def store(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        self.made.store(self.next_entry, nbytes, session=session)
        answer = self.made.lane.last()
        assert isinstance(answer, self.answers)
        self.next_entry += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 8 * KIB))
    def restore(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger.sessions[session]
        entry = data.draw(st.sampled_from([*record.entries, 999]))
        known = record.entries.get(entry)
        size = known.raw_bytes if known else nbytes
        segment = data.draw(st.sampled_from([0, 0, *record.segments]))
        self.made.restore(entry, size, ticket=self.next_ticket, session=session, segment=segment)
        self.next_ticket += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=st.integers(1, 3))
    def restore_together(self, data: st.DataObject, count: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        entries = self.made.ledger.sessions[session].entries
        asked = []
        for _ in range(count):
            entry = data.draw(st.sampled_from([*entries, 999]))
            known = entries.get(entry)
            asked.append((self.next_ticket, entry, known.raw_bytes if known else 1))
            self.next_ticket += data.draw(st.integers(0, 1))
        self.made.restore_together(*asked, session=session)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), segment=st.integers(1, 2), nbytes=st.integers(1, 10 * KIB))
    def map(self, data: st.DataObject, segment: int, nbytes: int) -> None:
        self.made.map(segment, nbytes, session=data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(
        data=st.data(),
        pieces=st.dictionaries(st.integers(3, 5), st.sampled_from(range(0, 8 * KIB, KIB))),
        segment=st.integers(1, 2),
        nbytes=st.integers(1, 4 * KIB),
    )
    def map_pieces(
        self, data: st.DataObject, pieces: dict[int, int], segment: int, nbytes: int
    ) -> None:
        session = data.draw(st.sampled_from(self.living))
        self.made.take(ReserveRange(segment=segment, nbytes=8 * KIB), session=session)
        for number, offset in pieces.items():
            piece = MapPiece(segment=number, into=segment, offset=offset, nbytes=nbytes)
            self.made.take(piece, session=session)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), segment=st.integers(1, 5))
    def unmap(self, data: st.DataObject, segment: int) -> None:
        self.made.unmap(segment, session=data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        entries = [*self.made.ledger.sessions[session].entries, 999]
        chosen = data.draw(st.lists(st.sampled_from(entries), max_size=3))
        self.made.release(*chosen, session=session)

    @precondition(lambda self: self.made.lane.jobs)
    @rule(data=st.data(), share=st.floats(0.01, 1.0), fail=st.booleans())
    def finish(self, data: st.DataObject, share: float, fail: bool) -> None:
        index = data.draw(st.integers(0, len(self.made.lane.jobs) - 1))
        self.made.lane.finish(index, share=share, fail=fail)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.made.end(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.made.lane.detaching)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self.made.lane.detach(data.draw(st.sampled_from(sorted(self.made.lane.detaching))))

    @precondition(lambda self: self.made.ledger.leases.is_freeing)
    @rule()
    def free_some(self) -> None:
        self.made.lane.take(self.made.ledger.leases.free_some())

    @rule(now=st.floats(0.0, 6.0))
    def tick(self, now: float) -> None:
        self.made.lane.take(self.made.ledger.tick(now))

    @invariant()
    def holds(self) -> None:
        self.made.ledger.assert_invariants()

    def teardown(self) -> None:
        for session in self.living:
            self.made.end(session)
        while self.made.ledger.leases.is_freeing:
            self.free_some()
        leases.FREED_A_TURN = self.freed_a_turn
        for session in sorted(self.made.lane.detaching):
            self.made.lane.detach(session)
        assert (self.made.used, self.made.promised, self.made.ledger.holdings.entries) == (0, 0, 0)
        assert self.made.ledger.holdings.raw_bytes == 0
        assert self.made.ledger.sessions == {}


class SharingMachine(LedgerMachine):
    """One where limits give each session a share: what is a session's own it always gets."""

    def held_by(self, session: int) -> int:
        """Return the bytes of the pool that count for a session's share."""
        return self.made.ledger.sessions[session].used_bytes

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 8 * KIB))
    def store_within_the_share(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        self.made.store(self.next_entry, nbytes, session=session)
        self.next_entry += 1
        answer = self.made.lane.last()
        if isinstance(answer, Rejected) and answer.reason == "pool_full":
            assert self.held_by(session) + granules(blob_bound(nbytes)) > self.limits.share_bytes
