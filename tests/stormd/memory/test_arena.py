"""The arena: promises that hold, blocks that never overlap, space that comes back whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from stormd.memory.arena import GRANULE, Block, Extent, Space, granules, slack_of

CAPACITY = 64 * GRANULE


def placed(space: Space, nbytes: int) -> Block:
    assert space.promise(nbytes)
    return space.place(nbytes, nbytes)


class ArenaMachine(RuleBasedStateMachine):
    """Random promises, placements and releases, checked against a map of owned granules."""

    promises = Bundle("promises")
    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(CAPACITY)
        self.owned: dict[int, int] = {}  # granule -> the block that owns it
        self.count = 0

    @rule(target=promises, nbytes=st.integers(1, CAPACITY // 2))
    def promise(self, nbytes: int) -> object:
        use = self.space.use()
        fits = use.used + use.promised + granules(nbytes) <= use.capacity
        assert self.space.promise(nbytes) == fits
        return nbytes if fits else multiple()

    @rule(promised=consumes(promises))
    def withdraw(self, promised: int) -> None:
        self.space.withdraw(promised)

    @rule(target=blocks, promised=consumes(promises), share=st.floats(0.01, 1.0))
    def place(self, promised: int, share: float) -> tuple[int, Block]:
        nbytes = max(1, int(promised * share))
        block = self.space.place(promised, nbytes)
        assert sum(extent.nbytes for extent in block.extents) == granules(nbytes)
        assert sum(piece.nbytes for piece in block.used_extents()) == nbytes
        self.count += 1
        for granule in self._granules(block):
            assert granule not in self.owned, "two blocks overlap"
            assert 0 <= granule < CAPACITY // GRANULE
            self.owned[granule] = self.count
        return self.count, block

    @rule(made=consumes(blocks))
    def release(self, made: tuple[int, Block]) -> None:
        number, block = made
        for granule in self._granules(block):
            assert self.owned.pop(granule) == number
        self.space.release(block)

    @invariant()
    def holds(self) -> None:
        self.space.assert_invariants()
        assert self.space.use().used == len(self.owned) * GRANULE

    @staticmethod
    def _granules(block: Block) -> list[int]:
        return [
            start // GRANULE
            for offset, nbytes in block.extents
            for start in range(offset, offset + nbytes, GRANULE)
        ]


TestArenaMachine = ArenaMachine.TestCase


def test_slack_keeps_blocks_of_a_full_space_whole() -> None:
    whole, splintered = _extents_a_block(slack_of(64 << 20)), _extents_a_block(0)
    assert whole < 2.5 < splintered


def _extents_a_block(slack: int) -> float:
    """Return the mean over the later half of 4,000 blocks in a space that stays full."""
    chance = random.Random(5)
    space = Space(64 << 20, slack=slack)
    blocks: list[Block] = []
    counts = []
    for _ in range(4000):
        wanted = chance.choice([16 << 10, 64 << 10, 256 << 10, 512 << 10])
        while not space.promise(wanted):
            space.release(blocks.pop(chance.randrange(len(blocks))))
        blocks.append(space.place(wanted, int(wanted * chance.uniform(0.5, 0.8))))
        counts.append(len(blocks[-1].extents))
    space.assert_invariants()
    return sum(counts[2000:]) / 2000


def test_a_space_adopts_what_another_has_placed() -> None:
    before = Space(CAPACITY, base=16 * GRANULE, slack=2 * GRANULE)
    blocks = [placed(before, (number % 5 + 1) * GRANULE - 7) for number in range(12)]
    for number in (1, 4, 5, 9):
        before.release(blocks[number])
    kept = [block for number, block in enumerate(blocks) if number not in (1, 4, 5, 9)]
    kept.append(placed(before, 11 * GRANULE))  # in pieces
    assert before.promise(3 * GRANULE)
    after = Space(CAPACITY, base=16 * GRANULE, slack=2 * GRANULE)
    after.adopt(kept, 3 * GRANULE)
    after.assert_invariants()
    one, other = before.use(), after.use()
    assert (one.used, one.promised, one.largest_free) == (
        other.used,
        other.promised,
        other.largest_free,
    )
    after.place(3 * GRANULE, 1)
    for block in kept:
        after.release(block)
    after.assert_invariants()


def test_what_cannot_be_is_not_adopted() -> None:
    for extents in ([(0, 2), (1, 2)], [(0, 1), (0, 1)], [(65, 2)], [(0, 65)]):
        blocks = [
            Block((Extent(offset * GRANULE, size * GRANULE),), size * GRANULE)
            for offset, size in extents
        ]
        with pytest.raises(ValueError, match=r"of a pool with|are used and"):
            Space(CAPACITY, slack=2 * GRANULE).adopt(blocks, 0)
    block = Block((Extent(0, 60 * GRANULE),), 60 * GRANULE)
    Space(CAPACITY).adopt([block], 4 * GRANULE)
    with pytest.raises(ValueError, match="promised of"):
        Space(CAPACITY).adopt([block], 5 * GRANULE)
    Space(CAPACITY, committed=0).adopt([], 0)


def test_the_end_of_a_space_goes_where_nothing_needs_it() -> None:
    space = Space(CAPACITY, committed=CAPACITY // 2)
    assert space.promise(GRANULE)
    block = space.place(GRANULE, GRANULE)
    assert space.promise(CAPACITY // 4)
    assert not space.shrink(CAPACITY // 4), "what is left would not hold what is promised"
    assert space.shrink(CAPACITY // 8)
    space.assert_invariants()
    assert space.use().ready == CAPACITY // 2 - CAPACITY // 8
    space.withdraw(CAPACITY // 4)
    assert not space.shrink(space.committed), "the block is in it"
    assert space.shrink(space.committed - GRANULE)
    space.assert_invariants()
    assert (space.committed, space.use().ready, space.is_growing) == (GRANULE, GRANULE, True)
    space.release(block)
    assert space.shrink(GRANULE)
    space.grow(CAPACITY)
    space.assert_invariants()
    assert space.promise(CAPACITY)
