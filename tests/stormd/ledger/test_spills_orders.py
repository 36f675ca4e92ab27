"""The ledger with a tier on disk, under events in any order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from support.ledger_bench import KIB, LIMITS, LedgerBench
from support.ledger_machine import LedgerMachine, SharingMachine

from stormd.ledger import spill_moves, spill_order
from stormd.ledger.chunks import blob_bound
from stormd.ledger.on_disk import DiskPhase
from stormd.memory.arena import granules
from stormd.memory.extents import disk_bytes

CAPACITY = 32 * KIB
RESERVE = granules(blob_bound(8 * KIB))
SHARE = 6 * KIB
SMALL_DISK = 4 * disk_bytes(blob_bound(8 * KIB))


class SpillMachine(LedgerMachine):
    """Sessions that do anything, over a tier that answers at any time, and may end."""

    limits = replace(LIMITS, max_entries=20, quota_bytes=0)
    disk_bytes = 1024 * KIB

    def __init__(self) -> None:
        self.least_bytes, spill_order.MIN_BYTES = spill_order.MIN_BYTES, 1
        self.moving_most, spill_moves.MAX_MOVING = spill_moves.MAX_MOVING, 3
        super().__init__()

    def bench(self) -> LedgerBench:
        return LedgerBench(
            self.limits,
            CAPACITY,
            committed=self.committed,
            disk_bytes=self.disk_bytes,
            reserve=RESERVE,
        )

    def come(self) -> None:
        """Have the disk make the room that a store waits for, or memory come."""
        space = self.made.space
        if self.made.spills.is_waited_for:
            self.made.tier.move()
            assert self.made.tier.jobs, "a store waits for a disk that does nothing"
            self.made.tier.finish()
        else:
            assert space.use().ready < space.wanted <= CAPACITY
            space.grow(min(4 * KIB, CAPACITY - space.committed))
        self.made.ledger.assert_invariants()

    @rule()
    def move(self) -> None:
        self.made.tier.move()

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=st.integers(1, 5))
    def forward(self, data: st.DataObject, count: int) -> None:
        """Store as a forward pass does."""
        session = data.draw(st.sampled_from(self.living))
        for _ in range(count):
            self.made.store(self.next_entry, 6 * KIB, session=session)
            self.next_entry += 1
            if self.made.lane.jobs:
                self.made.lane.finish(len(self.made.lane.jobs) - 1)
            self.made.tier.move()

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=st.integers(1, 5))
    def backward(self, data: st.DataObject, count: int) -> None:
        """Ask as a backward pass does, for the newest first."""
        session = data.draw(st.sampled_from(self.living))
        entries = self.made.ledger.sessions[session].entries
        asked = [
            (self.next_ticket + index, number, entries[number].raw_bytes)
            for index, number in enumerate([*entries][: -count - 1 : -1])
        ]
        self.next_ticket += count
        if asked:
            self.made.restore_together(*asked, session=session)
        self.made.tier.move()

    @precondition(lambda self: self.made.tier.jobs)
    @rule(data=st.data())
    def finish_move(self, data: st.DataObject) -> None:
        self.made.tier.finish(data.draw(st.integers(0, len(self.made.tier.jobs) - 1)))

    @precondition(lambda self: self.made.tier.jobs)
    @rule(data=st.data(), chance=st.integers(0, 19))
    def fail_move(self, data: st.DataObject, chance: int) -> None:
        if chance == 7:
            index = data.draw(st.integers(0, len(self.made.tier.jobs) - 1))
            self.made.tier.finish(index, fail=True)

    @rule(chance=st.integers(0, 39))
    def end_tier(self, chance: int) -> None:
        if chance == 7:
            self.made.lane.take(self.made.spills.end("the disk is too slow"))

    @rule()
    def everybody_gets_on(self) -> None:
        """Once lanes and tier have done what they have, no restore waits any more."""
        made = self.made
        while made.ledger.leases.is_freeing:  # as the loop does between other things
            self.free_some()
        made.tier.move()
        while made.lane.jobs or made.tier.jobs:
            if made.lane.jobs:
                made.lane.finish()
            else:
                made.tier.finish()
            made.tier.move()
        for record in made.ledger.sessions.values():
            assert not record.tickets, "a restore waits for ever"

    def teardown(self) -> None:
        spill_order.MIN_BYTES, spill_moves.MAX_MOVING = self.least_bytes, self.moving_most
        for session in self.living:
            self.made.end(session)
        while self.made.ledger.leases.is_freeing:
            self.free_some()
        for session in sorted(self.made.lane.detaching):
            self.made.lane.detach(session)
        while self.made.tier.jobs:
            self.made.tier.finish()
        super().teardown()
        status = self.made.spills.as_status(0.0)
        assert (status["used_bytes"], status["away_bytes"]) == (0, 0)


class FullDiskMachine(SpillMachine):
    """The same with a disk that is soon full."""

    disk_bytes = SMALL_DISK


class GrowingSpillMachine(SpillMachine):
    """The same over a pool that begins with nothing."""

    committed = 0


class SpillShareMachine(SharingMachine, SpillMachine):
    """The same with shares: what is a session's own it always gets, also once the tier has ended.

    What its own restores use in the pool counts.
    """

    limits = replace(LIMITS, max_entries=20, quota_bytes=0, share_bytes=SHARE)

    def held_by(self, session: int) -> int:
        record = self.made.ledger.sessions[session]
        in_use = (one for one in record.entries.values() if one.in_use and not one.charge)
        return record.used_bytes + sum(
            one.disk.pool_bytes
            for one in in_use
            if one.disk_phase in {DiskPhase.CLEAN, DiskPhase.READING} and one.disk is not None
        )


class FullDiskShareMachine(SpillShareMachine):
    """The same with a disk that is soon full."""

    disk_bytes = SMALL_DISK


TestSpillMachine = SpillMachine.TestCase
TestGrowingSpillMachine = GrowingSpillMachine.TestCase
TestSpillShareMachine = SpillShareMachine.TestCase
TestFullDiskShareMachine = FullDiskShareMachine.TestCase


@pytest.mark.parametrize(
    "kind", [SpillMachine, FullDiskMachine, SpillShareMachine, FullDiskShareMachine]
)
@pytest.mark.parametrize("seed", range(3))
def test_many_steps_of_trainers(kind: type[SpillMachine], seed: int) -> None:
    """Far into a run, where most is on the disk: a search for orders seldom gets there."""
    machine = kind()
    walk = _Walk(machine.made, Random(seed))
    for session in (1, 2, 3):
        machine.made.open(session)
    for step in range(500):
        walk.step()
        if step == 450 and seed == 1:
            walk.fail()
        if step % 5 == 0:
            machine.made.ledger.assert_invariants()
    machine.everybody_gets_on()
    machine.teardown()
    assert walk.written > 20
    assert walk.read > 10


class _Walk:
    """Steps of trainers and answers of lane and tier, at random."""

    def __init__(self, made: LedgerBench, random: Random) -> None:
        self.made = made
        self.random = random
        self.entry = self.ticket = 1
        self.written = self.read = 0
        made.on_wait = self.come
        self.actions = (
            (self.store, 6),
            (self.restore_newest, 3),
            (self.restore_any, 1),
            (self.release, 3),
            (self.lane, 8),
            (self.tier, 8),
        )

    def step(self) -> None:
        actions, weights = zip(*self.actions, strict=True)
        self.random.choices(actions, weights)[0](self.random.randint(1, 3))
        self.made.tier.move()

    def come(self) -> None:
        self.made.tier.move()
        self.tier(1)

    def fail(self) -> None:
        """End the tier: by a fault, or because it stands still."""
        jobs = self.made.tier.jobs
        if jobs:
            self.made.tier.finish(self.random.randrange(len(jobs)), fail=True)
        else:
            self.made.lane.take(self.made.spills.end("the disk is too slow"))

    def store(self, session: int) -> None:
        for _ in range(self.random.randint(1, 4)):
            self.made.store(self.entry, self.random.randint(1, 8 * KIB), session=session)
            self.entry += 1

    def restore_newest(self, session: int) -> None:
        entries = self.made.ledger.sessions[session].entries
        self._restore(session, [*entries][: -self.random.randint(1, 8) : -1])

    def restore_any(self, session: int) -> None:
        entries = [*self.made.ledger.sessions[session].entries]
        self._restore(session, self.random.sample(entries, min(4, len(entries))))

    def _restore(self, session: int, numbers: list[int]) -> None:
        entries = self.made.ledger.sessions[session].entries
        asked = [
            (self.ticket + index, number, entries[number].raw_bytes)
            for index, number in enumerate(numbers)
        ]
        self.ticket += len(asked)
        if asked:
            self.made.restore_together(*asked, session=session)

    def release(self, session: int) -> None:
        entries = [*self.made.ledger.sessions[session].entries]
        self.made.release(*self.random.sample(entries, len(entries) // 3), session=session)

    def lane(self, _session: int) -> None:
        jobs = self.made.lane.jobs
        for _ in range(min(len(jobs), self.random.randint(1, 4))):
            self.made.lane.finish(self.random.randrange(len(jobs)), share=self.random.random())

    def tier(self, _session: int) -> None:
        jobs = self.made.tier.jobs
        for _ in range(min(len(jobs), self.random.randint(1, 3))):
            index = self.random.randrange(len(jobs))
            self.written += not jobs[index].is_read
            self.read += jobs[index].is_read
            self.made.tier.finish(index)
