"""Ranks follow the same decision from the same step on, or each plans for itself; nobody waits."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from storm_client.planner.agreement import (
    Agreement,
    Alone,
    Decided,
    Deciding,
    Following,
    Limits,
    Moment,
    Put,
    Query,
    Reporting,
)

LIMITS = Limits(seconds=5.0, steps=10, forming_steps=4)
LONG_ENOUGH = 400
"""Steps of each rank in which everything has to come to rest."""


class Store:
    """What ranks share: the values of keys, none of which is written twice with another value."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.looks = 0

    def put(self, put: Put) -> None:
        if put.is_claim:
            self.values.setdefault(put.key, put.value)
            return
        if not put.key.endswith("/latest"):
            assert self.values.get(put.key, put.value) == put.value, put
        self.values[put.key] = put.value

    def find(self, queries: Sequence[Query]) -> dict[str, str] | None:
        for needed, optional in queries:
            self.looks += 1
            if all(key in self.values for key in needed):
                keys = (*needed, *optional)
                return {key: self.values[key] for key in keys if key in self.values}
        return None


class Rank:
    """One that begins a step whenever the test says so."""

    def __init__(self, number: int, world: int, store: Store) -> None:
        self.store = store
        self.step = 0
        self.agreement = Agreement(
            number, world, "same", prefix="storm/0/0", now=Moment(0, 0.0), limits=LIMITS
        )
        self.followed: dict[int, int] = {}
        """By decision, the step from which on it was followed."""
        self.choice = ""

    def begin(self, seconds: float, *, has_news: bool = False, turns: int = 16) -> None:
        """Begin a step, in which an interrupt may let no more than some `turns` happen."""
        self.step += 1
        agreement, now = self.agreement, Moment(self.step, seconds)
        agreement.tick(now)
        if has_news:
            agreement.start_round()
        while turns and self._turn(now):
            agreement.assert_invariants()
            turns -= 1
        if not turns:
            return
        choice = agreement.due(self.step)
        if choice is not None:
            assert isinstance(agreement.phase, Decided)
            self.followed[agreement.phase.round] = self.step
            self.choice = choice
            agreement.follow(self.step)
        agreement.assert_invariants()

    def _turn(self, now: Moment) -> bool:
        agreement = self.agreement
        if isinstance(agreement.phase, Reporting):
            agreement.report(f"figures of {agreement.rank}", self.step, now)
            return True
        if isinstance(agreement.phase, Deciding):
            agreement.decide(json.dumps(agreement.phase.reports), self.step)
            return True
        while agreement.outbox:
            self.store.put(agreement.outbox.popleft())
        found = self.store.find(agreement.queries(self.step, now))
        if found is not None:
            agreement.receive(found, self.step, now)
        return found is not None

    @property
    def is_alone(self) -> bool:
        return isinstance(self.agreement.phase, Alone)


def ranks_of(count: int) -> list[Rank]:
    store = Store()
    return [Rank(n, count, store) for n in range(count)]


def come_to_rest(ranks: Sequence[Rank], seconds: float) -> None:
    for _ in range(LONG_ENOUGH):
        seconds += 1.0
        for rank in ranks:
            rank.begin(seconds)


@given(st.data())
def test_all_follow_the_same_from_the_same_step_on_or_each_is_alone(data: st.DataObject) -> None:
    """Ranks begin steps in any order, however far apart; some join late, call or die."""
    count = data.draw(st.integers(2, 4), "ranks")
    ranks = ranks_of(count)
    seconds = 0.0
    alive = set(range(count))
    moves = st.tuples(
        st.integers(0, count - 1),
        st.sampled_from([0.0, 0.1, 1.0, 6.0]),
        st.booleans(),
        st.integers(0, 60).map(lambda n: n == 0),
        st.sampled_from([16, 16, 0, 1, 2]),
    )
    for number, passed, has_news, dies, turns in data.draw(st.lists(moves, max_size=120), "moves"):
        seconds += passed
        if dies and len(alive) > 1:
            alive.discard(number)
        if number in alive:
            ranks[number].begin(seconds, has_news=has_news, turns=turns)
    left = [ranks[number] for number in sorted(alive)]
    come_to_rest(left, seconds)

    rounds: dict[int, set[int]] = {}
    for rank in ranks:
        for number, step in rank.followed.items():
            if rank.agreement.rank in rank.agreement.members:
                rounds.setdefault(number, set()).add(step)
    assert all(len(steps) == 1 for steps in rounds.values())
    assert all(isinstance(rank.agreement.phase, Following | Alone) for rank in left)
    assert len({rank.is_alone for rank in left}) == 1, [rank.agreement.phase for rank in left]
    if not left[0].is_alone:
        assert len({rank.choice for rank in left}) == 1
        assert len({rank.agreement.phase.round for rank in left}) == 1  # type: ignore[union-attr]


def test_a_rank_that_joins_late_takes_over_what_the_others_follow() -> None:
    ranks = ranks_of(3)
    for step in range(20):
        for rank in ranks[:2]:
            rank.begin(float(step))
    assert ranks[0].followed
    assert ranks[0].agreement.members == (0, 1)
    for step in range(20, 40):
        for rank in ranks:
            rank.begin(float(step))
    assert ranks[2].choice == ranks[0].choice
    ranks[2].begin(40.0, has_news=True)
    for step in range(41, 80):
        for rank in ranks:
            rank.begin(float(step))
    assert "figures of 2" in ranks[0].choice
    assert ranks[2].choice == ranks[0].choice == ranks[1].choice


def test_a_rank_that_never_comes_leaves_the_other_alone_with_a_word() -> None:
    ranks = ranks_of(2)
    for step in range(20):
        ranks[0].begin(float(step))
    assert ranks[0].agreement.phase == Alone("ranks [1] have not shown which steps they run")
    for step in range(20, 24):
        ranks[1].begin(float(step))
    assert ranks[1].is_alone


def test_a_store_that_fails_leaves_the_rank_alone() -> None:
    (rank,) = ranks_of(2)[:1]
    rank.agreement.fail("it is gone")
    for step in range(4):
        rank.begin(float(step))
    assert rank.agreement.phase == Alone("it is gone")
    assert not rank.store.values
