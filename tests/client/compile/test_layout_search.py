"""Packing: layouts that greedy orders do not find, none where there is none, all blocks apart."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from storm_client.compile import layout_search
from storm_client.compile.layout import Block, Layout, bound, greedy, tightened
from storm_client.compile.layout_search import packed
from support.cut_rectangle import HEIGHT, pieces


def few_blocks(seed: int) -> list[Block]:
    chosen = random.Random(seed)
    alignments = chosen.choice([[1], [1], [1, 2, 4]])
    begins = [chosen.randrange(6) for _ in range(chosen.choice([4, 5, 6]))]
    return [
        Block(n, n + chosen.randrange(1, 5), chosen.randrange(1, 9), chosen.choice(alignments))
        for n in begins
    ]


def least(blocks: list[Block]) -> int:
    """Return what the best layout needs: some order has each block lie as low as it fits."""
    return min(stacked(order) for order in permutations(blocks))


def stacked(order: tuple[Block, ...]) -> int:
    placed: list[tuple[Block, int]] = []
    for block in order:
        taken = [(at, at + b.nbytes) for b, at in placed if meet(b, block)]
        offset = 0
        for begin, end in sorted(taken):
            if begin < offset + block.nbytes and offset < end:
                offset = -(-end // block.alignment) * block.alignment
        placed.append((block, offset))
    return max(offset + block.nbytes for block, offset in placed)


def meet(one: Block, other: Block) -> bool:
    return one.begin < other.end and other.begin < one.end


def check(blocks: list[Block], offsets: tuple[int, ...] | None, capacity: int) -> None:
    assert offsets is not None
    Layout(offsets, capacity, bound(blocks)).assert_invariants(blocks)


@pytest.mark.parametrize(
    ("seed", "count", "step"),
    [(0, 100, 1), (1, 100, 64), (2, 100, 1), (3, 100, 64), (4, 150, 1), (5, 150, 64)],
)
def test_pieces_of_a_rectangle_are_put_together_again(seed: int, count: int, step: int) -> None:
    """As no greedy order puts them."""
    blocks = pieces(seed, count, step)
    assert bound(blocks) == HEIGHT < greedy(blocks).nbytes
    check(blocks, packed(blocks, HEIGHT, 60.0), HEIGHT)


@pytest.mark.parametrize(
    ("seed", "count", "lost"), [(15, 100, 3), (49, 100, 6), (72, 100, 10), (77, 150, 9)]
)
def test_gaps_are_left_where_pieces_are_missing(seed: int, count: int, lost: int) -> None:
    """A search that leaves none of its own accord, or too large ones, does not find these."""
    blocks = pieces(seed, count)[lost:]
    assert greedy(blocks).nbytes > HEIGHT
    check(blocks, packed(blocks, HEIGHT, 20.0), HEIGHT)


def test_what_fits_is_found_and_what_does_not_is_not() -> None:
    """Where every order can be tried; some of them have gaps in their best layout."""
    above = 0
    for seed in range(150):
        blocks = few_blocks(seed)
        capacity = least(blocks)
        above += capacity > bound(blocks)
        check(blocks, packed(blocks, capacity, 60.0), capacity)
        assert packed(blocks, capacity - 1, 60.0) is None, seed
    assert above > 10


def test_the_same_seed_finds_the_same() -> None:
    blocks = pieces(1, 40)
    first = packed(blocks, HEIGHT, 60.0, seed=7)
    assert first is not None
    assert first == packed(blocks, HEIGHT, 60.0, seed=7)


def test_blocks_without_bytes_lie_anywhere() -> None:
    assert packed([], 0, 60.0) == ()
    assert packed([Block(0, 2, 0), Block(1, 2, 0, 8)], 0, 60.0) == (0, 0)
    assert packed([Block(0, 9, 0), Block(1, 2, 4), Block(1, 3, 4)], 8, 60.0) in {
        (0, 0, 4),
        (0, 4, 0),
    }


def test_without_time_nothing_is_found() -> None:
    assert packed(pieces(0, 40), HEIGHT, 0.0) is None


def test_more_blocks_than_tables_can_hold_are_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = [Block(n, n + 1, 1) for n in range(5)]
    check(blocks, packed(blocks, 1, 60.0), 1)
    monkeypatch.setattr(layout_search, "MOST_BLOCKS", 4)
    assert packed(blocks, 1, 60.0) is None


def test_a_layout_is_tightened_to_the_least() -> None:
    """Where the bound is met, and where it cannot be."""
    searched = 0
    for seed in range(150):
        blocks = few_blocks(seed)
        found = tightened(blocks, worst(blocks), 60.0)
        found.assert_invariants(blocks)
        assert found.nbytes == least(blocks), seed
        searched += found.nbytes > found.bound
    assert searched > 10


def worst(blocks: list[Block]) -> Layout:
    offsets = []
    top = 0
    for block in blocks:
        offsets.append(-(-top // block.alignment) * block.alignment)
        top = offsets[-1] + block.nbytes
    return Layout(tuple(offsets), top, bound(blocks))
