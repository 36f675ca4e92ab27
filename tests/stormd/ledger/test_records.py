"""What is written down is what there is, after every event; and another ledger goes on with it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from support.fake_lane import FakeLane
from support.ledger_bench import CAPACITY, KIB, LIMITS, LedgerBench
from support.ledger_machine import LedgerMachine

from stormd.ledger import leases, spill_order
from stormd.ledger.events import Recorded, Skip, StoreDone, StoreFailed
from stormd.ledger.records import JournalRecords, Layout, State, read_state
from stormd.ledger.sessions import Phase, Session
from stormd.memory.arena import Block, Space
from stormd.memory.journal import Journal
from stormd.protocol import Admitted, ListEntries, PassOver, Rejected, Stored

LAYOUT = Layout(
    pool_bytes=CAPACITY, cache_bytes=0, committed=(CAPACITY,), chunk_bytes={"cpu": 1, "cuda": 2}
)


def bench(journal: Journal, **options: object) -> LedgerBench:
    records = JournalRecords(journal)
    records.record_layout(LAYOUT)
    return LedgerBench(records=records, **options)  # type: ignore[arg-type]


def left(journal: Journal) -> State:
    """Return what another process would read now."""
    other, found = Journal.open(os.dup(journal.descriptor))
    other.close()
    return read_state(found)


def successor(made: LedgerBench, journal: Journal) -> tuple[LedgerBench, Journal]:
    """Return a ledger that goes on where one has ended between two instructions."""
    other, found = Journal.open(os.dup(journal.descriptor))
    state = read_state(found)
    records = JournalRecords(other)
    records.adopt(state)
    again = LedgerBench(made.ledger._state.limits, records=records)
    again.lane.memory = made.lane.memory
    again.space.adopt(state.pool_blocks(), state.promised_bytes())
    for session in state.sessions:
        again.ledger.leases.adopt(session, 0.0)
    journal.close()
    return again, other


def come_back(made: LedgerBench, session: int = 1) -> Session:
    record = made.ledger.sessions[session]
    made.ledger.leases.resume(record, 0.0)
    made.ledger.leases.attach(record, 0.0)
    return record


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.make()
    yield made
    made.close()


class CrashingMachine(LedgerMachine):
    """Sessions that do anything, over a ledger that ends at any moment and is followed by another.

    What a lane was doing then is not done. Clients come back, or do not, and ask once more.
    """

    answers = (Admitted, Rejected, Stored)

    def __init__(self) -> None:
        self.journal = Journal.make()
        super().__init__()

    def bench(self) -> LedgerBench:
        return bench(self.journal, limits=self.limits)

    @rule()
    def crash(self) -> None:
        self.made, self.journal = successor(self.made, self.journal)
        self.made.on_wait = self.come
        self.made.ledger.assert_invariants()
        for record in self.made.ledger.sessions.values():
            assert record.phase is Phase.ORPHANED

    @precondition(lambda self: self.made.ledger.leases.orphans())
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        orphans = [one.info.session for one in self.made.ledger.leases.orphans()]
        come_back(self.made, data.draw(st.sampled_from(orphans)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def store_again(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger.sessions[session]
        if not record.entries:
            return
        number = data.draw(st.sampled_from(sorted(record.entries)))
        entry = record.entries[number]
        can_be = record.phase is Phase.ATTACHED and not entry.released
        is_stored, is_begun = entry.block is not None, entry.is_begun
        self.made.store(number, entry.raw_bytes, session=session)
        answer = self.made.lane.last()
        if can_be and is_stored:
            assert isinstance(answer, Stored)
        elif can_be and not is_begun:
            assert isinstance(answer, Admitted)
        else:
            assert isinstance(answer, Rejected)

    @invariant()
    def what_is_written_down_is_what_there_is(self) -> None:
        state = left(self.journal)
        kept = {one.record.info.session: one for one in state.sessions}
        records = self.made.ledger.sessions
        assert kept.keys() == {n for n, one in records.items() if one.phase is not Phase.ENDING}
        for session, one in kept.items():
            entries = records[session].entries
            assert one.entries.keys() == entries.keys()
            for number, entry in one.entries.items():
                # That of one which was released is not written down: it goes with its restores.
                assert entries[number].released or entry.block == entries[number].block
                assert entry.raw_bytes == entries[number].raw_bytes
        Space(CAPACITY).adopt(state.pool_blocks(), state.promised_bytes())

    def teardown(self) -> None:
        super().teardown()
        assert left(self.journal).is_empty
        self.journal.assert_invariants()
        self.journal.close()


class _KilledError(BaseException):
    """The process has ended; nothing of it does anything more."""


EVENTS: list[Callable[[LedgerBench], object]] = [
    lambda made: made.open(1),
    lambda made: made.open(2),
    lambda made: made.store(1, 5 * KIB),
    lambda made: made.lane.finish(),
    lambda made: made.store(2, 3 * KIB, session=2),
    lambda made: made.store(3, 5 * KIB),
    lambda made: made.lane.finish(share=0.5),
    lambda made: made.lane.finish(fail=True),
    lambda made: made.store(4, 5 * KIB, session=2),
    lambda made: made.release(1),
    lambda made: made.store(5, 5 * KIB),
    lambda made: made.lane.finish(),
    lambda made: made.lane.finish(),
    lambda made: made.end(2),
    lambda made: made.lane.detach(2),
]


class _Dying:
    """Has the process end where its journal would be changed once more than `changes` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changes = math.inf
        for name in ("write", "erase"):
            monkeypatch.setattr(Journal, name, self._counted(getattr(Journal, name)))

    def _counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if not self.changes:
                raise _KilledError
            self.changes -= 1
            return change(*args)

        return counted


def entries(journal: Journal) -> dict[tuple[int, int], Block | None]:
    """Return the block of each entry that is written down; None of one that is promised room."""
    return {
        (one.record.info.session, number): entry.block
        for one in left(journal).sessions
        for number, entry in one.entries.items()
    }


def lived(journal: Journal, changes: float, dying: _Dying) -> tuple[LedgerBench, list[Any]]:
    """Return a ledger that has lived through all events, or has died, and what was there when."""
    made, there = bench(journal), [entries(journal)]
    dying.changes = changes
    with suppress(_KilledError):
        for event in EVENTS:
            event(made)
            there.append(entries(journal))
    dying.changes = math.inf
    return made, there


def test_whatever_record_was_the_last_all_that_was_answered_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process ends behind each record that is written or taken away, one after another."""
    dying, journal = _Dying(monkeypatch), Journal.make()
    _, whole = lived(journal, math.inf, dying)
    journal.close()
    for changes in itertools.count():
        journal = Journal.make()
        made, there = lived(journal, changes, dying)
        assert there == whole[: len(there)]
        found, before = entries(journal), there[-1]
        made, journal = successor(made, journal)
        made.ledger.assert_invariants()
        for session in list(made.ledger.sessions):
            come_back(made, session)
            made.end(session)
            made.lane.detach(session)
        assert left(journal).is_empty
        journal.close()
        if there == whole:
            break
        kept = before.keys() & whole[len(there)].keys()
        assert kept <= found.keys()
        assert all(before[one] in (None, found[one]) for one in kept)
    assert changes > len(EVENTS)


TestCrashingMachine = CrashingMachine.TestCase


def test_a_store_that_was_done_is_answered_as_it_was(journal: Journal) -> None:
    """Also where its source is unmapped: its client may have freed that, as `stored` allowed.

    What was not done needs its source, and must be the same.
    """
    made = bench(journal)
    made.open()
    made.store(1, 3 * KIB)
    made.lane.finish(share=0.5)
    stored = made.lane.last()
    made.store(2)
    made.store(3)
    again, other = successor(made, Journal(os.dup(journal.descriptor), journal.epoch))
    record = come_back(again)
    assert sorted(record.entries) == [1, 2, 3]
    again.store(3, 2 * KIB)
    rejected = again.told(Rejected)
    assert "entry 3 has 1024 bytes" in rejected.detail
    again.store(2)
    assert again.lane.last() == Admitted(2)
    again.lane.finish()
    assert isinstance(again.lane.last(), Stored)
    record.segments.clear()
    again.store(1, 3 * KIB)
    assert again.lane.last() == stored
    assert not again.lane.jobs
    again.store(3)
    assert isinstance(again.lane.last(), Rejected)
    again.ledger.assert_invariants()
    other.close()


def test_a_lane_that_asks_for_it_is_told_what_is_written_down(journal: Journal) -> None:
    made = bench(journal)
    record = made.ledger.sessions[made.open()]
    made.store(1, sequence=4)
    made.store(2, sequence=5)
    (first, second) = made.lane.jobs
    block = first.place(KIB)
    done = StoreDone(
        session=1, entry=1, block=block, mode="raw", seconds=0.0, sequence=first.sequence
    )
    told, *_ = made.ledger.on_results[StoreDone](record, [done], 0.0)
    assert told == Recorded(session=1, sequences=[4])
    assert left(journal).sessions[0].entries[1].block == block
    failed = StoreFailed(session=1, entry=2, detail="", sequence=second.sequence)
    told, *_ = made.ledger.on_results[StoreFailed](record, [failed], 0.0)
    assert told == Recorded(session=1, sequences=[5])


def test_a_number_without_a_store_is_passed_over(journal: Journal) -> None:
    made = bench(journal)
    made.open()
    assert made.ask(1, 0, PassOver(9)) == [Skip(session=1, sequence=9)]
    made.open(2, attach=False)
    assert made.ask(2, 0, PassOver(9)) == []


def test_what_is_on_disk_alone_is_not_written_down(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file ends with its daemon; what another one finds is what was in the pool."""
    monkeypatch.setattr(spill_order, "MIN_BYTES", 1)
    limits = replace(LIMITS, max_entries=100, quota_bytes=0)
    made = bench(journal, limits=limits, disk_bytes=1024 * KIB, reserve=9 * KIB)
    made.open()
    for number in range(1, 13):
        made.on_wait = made.tier.settle
        made.store(number, 8 * KIB)
        made.lane.finish()
    entries = made.ledger.sessions[1].entries
    in_pool = {number for number, entry in entries.items() if entry.block is not None}
    assert 1 not in in_pool
    assert left(journal).sessions[0].entries.keys() == in_pool
    made.restore(1, 8 * KIB)
    made.tier.settle()
    assert 1 in left(journal).sessions[0].entries
    again, other = successor(made, Journal(os.dup(journal.descriptor), journal.epoch))
    record = come_back(again)
    assert record.entries.keys() == {n for n, entry in entries.items() if entry.block is not None}
    again.ledger.assert_invariants()
    other.close()


def test_entries_are_listed_by_pages(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stormd.ledger.stores.ENTRIES_A_PAGE", 2)
    made = bench(journal)
    made.open()
    for number in (3, 5, 6, 9, 10):
        made.store(number)
    pages, after = [], 0
    for _ in range(3):
        made.lane.take(made.ask(1, 7, ListEntries(after)))
        page = made.lane.last()
        pages.append((page.numbers, page.is_all))  # type: ignore[union-attr]
        after = page.numbers[-1]  # type: ignore[union-attr]
    assert pages == [([3, 5], False), ([6, 9], False), ([10], True)]


def test_nothing_new_is_begun_where_the_journal_is_full(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(journal)
    made.open()
    monkeypatch.setattr("stormd.memory.journal.LEFT_CELLS", 1 << 30)
    made.store(1)
    rejected = made.told(Rejected)
    assert rejected.reason == "too_many_entries"


def test_a_session_resumed_in_vain_has_its_place_while_it_holds_something(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lifeline it ends in time; the share that its entries fill is nobody else's yet."""
    monkeypatch.setattr(leases, "FREED_A_TURN", 2)
    made = bench(journal, limits=replace(LIMITS, max_sessions=1))
    made.open()
    for entry in (1, 2, 3):
        made.store(entry)
        made.lane.finish()
    again, other = successor(made, journal)
    again.ledger.leases.resume(again.ledger.sessions[1], 0.0)
    again.end()
    again.ledger.assert_invariants()
    assert again.ledger.leases.refusal(1) is not None
    again.lane.take(again.ledger.leases.free_some())
    again.lane.detach(1)
    assert again.ledger.leases.refusal(1) is None
    other.close()


def test_a_lane_takes_nothing_of_an_orphan(journal: Journal) -> None:
    made = bench(journal)
    made.open()
    made.store(1)
    made.lane.finish()
    again, other = successor(made, Journal(os.dup(journal.descriptor), journal.epoch))
    assert isinstance(again.lane, FakeLane)
    again.end()
    assert (again.used, again.ledger.sessions, again.lane.ended) == (0, {}, [])
    other.close()
