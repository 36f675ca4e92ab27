"""The ledger under events in any order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.ledger_bench import CAPACITY, KIB, LIMITS, SHARE, STAGING, LedgerBench

from stormd import ledger
from stormd.arena import granules
from stormd.events import StoreJob
from stormd.parts import blob_bound
from stormd.protocol import Admitted, Failed, Rejected


class LedgerMachine(RuleBasedStateMachine):
    """Three sessions that do anything in any order, over a lane that answers at any time."""

    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.made = LedgerBench(self.limits)
        self.next_session = 1
        self.next_entry = 1
        self.next_ticket = 1
        self.next_plan = 1
        self.freed_a_turn = ledger.FREED_A_TURN
        ledger.FREED_A_TURN = 2  # so that sessions end while others go on

    @property
    def living(self) -> list[int]:
        return [one for one in self.made.ledger.sessions if one not in self.made.lane.detaching]

    @precondition(lambda self: self.made.ledger.refusal() is None)
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
        assert isinstance(answer, Admitted | Rejected)
        if isinstance(answer, Rejected) and answer.reason == "pool_full":
            runs = [run for one in self.made.ledger._sessions.values() for run in one.runs.values()]
            ending = [one for r in self.made.ledger._sessions.values() for one in r.spares]
            lent = sum(run.spares.nbytes for run in runs) + sum(one.charge for one in ending)
            assert self.made.ledger.kept_bytes == lent, "refused for what nobody uses"
        self.next_entry += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 8 * KIB))
    def restore(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger._sessions[session]
        entry = data.draw(st.sampled_from([*record.entries, 999]))
        known = record.entries.get(entry)
        size = known.raw_bytes if known else nbytes
        segment = data.draw(st.sampled_from([0, 0, *record.segments]))
        self.made.restore(entry, size, ticket=self.next_ticket, session=session, segment=segment)
        self.next_ticket += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), sizes=st.lists(st.integers(1, 10 * KIB), min_size=1, max_size=4))
    def register(self, data: st.DataObject, sizes: list[int]) -> None:
        session = data.draw(st.sampled_from(self.living))
        self.made.register(self.next_plan, *sizes, session=session)
        self.next_plan += data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        plans = self.made.ledger._sessions[session].plans
        plan = data.draw(st.sampled_from([*plans, 999]))
        self.made.run(plan, self.next_entry, session=session)
        self.next_entry += 4 * data.draw(st.integers(0, 1))

    @precondition(lambda self: self.living)
    @rule(data=st.data(), parts=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def hand(self, data: st.DataObject, parts: list[int]) -> None:
        """What was promised and is handed over as it was planned is never refused."""
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger._sessions[session]
        number = data.draw(st.sampled_from([*record.runs, *record.runs, 999]))
        offset = data.draw(st.sampled_from([0, 0, 0, 12 * KIB]))
        run, said = record.runs.get(number), len(self.made.lane.replies)
        promised = set() if run is None else {i for i in range(run.count) if not run.handed[i]}
        self.made.hand(number, *parts, session=session, offset=offset)
        answers = [reply[2] for reply in self.made.lane.replies[said:]]
        refused = {one.entry for one in answers if isinstance(one, Rejected | Failed)}
        for part in promised.intersection(parts):
            assert run is not None
            in_range = offset + run.plan.parts[part].nbytes <= STAGING
            if in_range and parts.count(part) == 1:
                assert run.first + part not in refused
                assert run.first + part in record.entries

    @precondition(lambda self: self.living)
    @rule(data=st.data(), share=st.floats(0.3, 1.0))
    def step(self, data: st.DataObject, share: float) -> None:
        """Run a plan from its beginning to the release of all, and keep what was not used."""
        session = data.draw(st.sampled_from(self.living))
        record, run = self.made.ledger._sessions[session], self.next_entry
        plan = data.draw(st.sampled_from([*record.plans, 999]))
        self.made.run(plan, run, session=session)
        count = record.runs[run].count if run in record.runs else 0
        if count:
            self.made.hand(run, *range(count), session=session)
            self.made.end_run(run, session=session)
            handed = range(run, run + count)
            jobs = self.made.lane.jobs
            while found := [n for n, one in enumerate(jobs) if self._is_of(one, handed)]:
                self.made.lane.finish(found[0], share=share)
            self.made.release(*handed, session=session)
        self.next_entry += 4

    @staticmethod
    def _is_of(job: object, entries: range) -> bool:
        return isinstance(job, StoreJob) and job.entry in entries

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def end_run(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        runs = self.made.ledger._sessions[session].runs
        self.made.end_run(data.draw(st.sampled_from([*runs, 999])), session=session)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        plans = self.made.ledger._sessions[session].plans
        self.made.forget(data.draw(st.sampled_from([*plans, 999])), session=session)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), count=st.integers(1, 3))
    def restore_together(self, data: st.DataObject, count: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        entries = self.made.ledger._sessions[session].entries
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
    @rule(data=st.data(), segment=st.integers(1, 2))
    def unmap(self, data: st.DataObject, segment: int) -> None:
        self.made.unmap(segment, session=data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.living))
        entries = [*self.made.ledger._sessions[session].entries, 999]
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

    @precondition(lambda self: self.made.ledger.is_freeing)
    @rule()
    def free_some(self) -> None:
        self.made.lane.take(self.made.ledger.free_some())

    @rule(now=st.floats(0.0, 6.0))
    def tick(self, now: float) -> None:
        self.made.lane.take(self.made.ledger.tick(now))

    @invariant()
    def holds(self) -> None:
        self.made.ledger.assert_invariants()

    def teardown(self) -> None:
        for session in self.living:
            self.made.end(session)
        while self.made.ledger.is_freeing:
            self.free_some()
        ledger.FREED_A_TURN = self.freed_a_turn
        for session in sorted(self.made.lane.detaching):
            self.made.lane.detach(session)
        assert (self.made.used, self.made.promised, self.made.ledger.entries) == (0, 0, 0)
        assert self.made.ledger.raw_bytes == 0
        assert self.made.ledger.sessions == []


class ShareMachine(LedgerMachine):
    """The same with shares and a user's quota: what is a session's own it always gets."""

    limits = replace(LIMITS, quota_bytes=0, user_quota_bytes=56 * KIB, share_bytes=SHARE)

    @precondition(lambda self: self.living)
    @rule(data=st.data(), nbytes=st.integers(1, 8 * KIB))
    def store_within_the_share(self, data: st.DataObject, nbytes: int) -> None:
        session = data.draw(st.sampled_from(self.living))
        record = self.made.ledger._sessions[session]
        self.made.store(self.next_entry, nbytes, session=session)
        self.next_entry += 1
        answer = self.made.lane.last()
        if isinstance(answer, Rejected) and answer.reason == "pool_full":
            assert record.used_bytes + granules(blob_bound(nbytes)) > SHARE

    @invariant()
    def entries_are_limited(self) -> None:
        for record in self.made.ledger._sessions.values():
            assert len(record.entries) + record.reserved[1] <= self.limits.max_entries

    @invariant()
    def quotas_hold(self) -> None:
        shares = self.made.ledger._holdings.shares
        assert max(shares.of_user(0), shares.of_user(1)) <= 56 * KIB
        assert shares.common_bytes <= CAPACITY - 3 * SHARE


TestShareMachine = ShareMachine.TestCase
TestShareMachine.settings = settings(max_examples=80, stateful_step_count=60)
TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=120, stateful_step_count=60)
