"""The ledger under events in any order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis.stateful import invariant, rule
from support.ledger_bench import CAPACITY, KIB, LIMITS, SHARE
from support.ledger_machine import LedgerMachine, SharingMachine


class ShareMachine(SharingMachine):
    """The same with shares and a user's quota: what is a session's own it always gets."""

    limits = replace(LIMITS, quota_bytes=0, user_quota_bytes=56 * KIB, share_bytes=SHARE)

    @invariant()
    def entries_are_limited(self) -> None:
        for record in self.made.ledger.sessions.values():
            assert len(record.entries) <= self.limits.max_entries

    @invariant()
    def quotas_hold(self) -> None:
        shares = self.made.ledger.holdings.shares
        assert max(shares.of_user(0), shares.of_user(1)) <= 56 * KIB
        assert shares.common_bytes <= CAPACITY - 3 * SHARE


class GrowingMachine(LedgerMachine):
    """The same over a pool that begins with nothing, and sometimes cannot have more for a while."""

    committed = 0

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(5)

    def come(self) -> None:
        if self.random.random() < 0.2:
            self.made.space.allow_growth(allowed=False)
        else:
            super().come()

    @rule()
    def have_more(self) -> None:
        self.made.space.allow_growth(allowed=True)


class GrowingShareMachine(ShareMachine):
    """The same with shares, over a pool that begins with nothing and always gets more."""

    committed = 0


TestGrowingMachine = GrowingMachine.TestCase
TestGrowingShareMachine = GrowingShareMachine.TestCase
TestLedgerMachine = LedgerMachine.TestCase
