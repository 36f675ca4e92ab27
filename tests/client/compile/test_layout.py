"""Layouts: no two blocks overlap, sizes near the bound, and the exact search where it is there."""

from __future__ import annotations

import random
import sys

import pytest
from storm_client.compile import layout
from storm_client.compile.layout import Block, Layout, bound, greedy, improved, laid_out
from storm_client.errors import UsageError
from support.cut_rectangle import pieces


def some_blocks(seed: int, count: int = 60) -> list[Block]:
    chosen = random.Random(seed)
    found = []
    for _ in range(count):
        begin = chosen.randrange(100)
        size = chosen.choice([0, 1, 100, 4096, chosen.randrange(1, 5000)])
        end = begin + chosen.randrange(1, 30)
        found.append(Block(begin, end, size, chosen.choice([1, 16, 64])))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_two_blocks_share_a_byte_at_any_time(seed: int) -> None:
    blocks = some_blocks(seed)
    found = greedy(blocks)
    found.assert_invariants(blocks)
    assert found.bound == bound(blocks) <= found.nbytes
    assert found.nbytes <= 1.35 * found.bound + 64 * len(blocks)


def test_blocks_of_nested_lives_take_no_more_than_the_bound() -> None:
    """As a forward and a backward pass make them."""
    blocks = [Block(n, 40 - n, 64 * (n + 1), 64) for n in range(20)]
    blocks += [Block(n, n + 1, 1024, 64) for n in range(40)]
    found = greedy(blocks)
    found.assert_invariants(blocks)
    assert found.is_best


def test_one_after_the_other_lie_in_the_same_place() -> None:
    assert greedy([Block(n, n + 1, 10) for n in range(5)]) == Layout((0,) * 5, 10, 10)
    assert greedy([]) == Layout((), 0, 0)


def test_what_shares_a_byte_is_noticed() -> None:
    blocks = [Block(0, 2, 10), Block(1, 3, 10)]
    Layout((0, 10), 20, 20).assert_invariants(blocks)
    for offsets in ((0, 9), (5, 0), (0, 0)):
        with pytest.raises(AssertionError):
            Layout(offsets, 20, 20).assert_invariants(blocks)
    with pytest.raises(AssertionError):
        Layout((0, 10), 19, 20).assert_invariants(blocks)


HARD = [
    Block(*one)
    for one in (
        (0, 3, 4), (3, 9, 4), (9, 20, 4), (0, 9, 4), (9, 21, 4), (0, 21, 4), (20, 27, 4),
        (21, 27, 4), (21, 27, 4),
        (0, 5, 2), (5, 12, 3), (12, 27, 2), (0, 12, 1), (5, 27, 1),
    )
]  # fmt: skip


def test_the_exact_search_is_never_worse_and_valid() -> None:
    pytest.importorskip("ortools")
    for blocks in [HARD, *(some_blocks(seed, 25) for seed in range(3))]:
        start = greedy(blocks)
        found = improved(blocks, start, 2.0, workers=1)
        found.assert_invariants(blocks)
        assert found.nbytes <= start.nbytes
        assert laid_out(blocks, 2.0).nbytes <= start.nbytes


def test_a_capacity_below_the_bound_is_not_searched_for() -> None:
    pytest.importorskip("ortools")
    start = greedy(HARD)
    assert improved(HARD, start, 60.0, capacity=start.bound - 1) is start


def test_without_the_solver_layouts_are_searched_for_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ortools", "ortools.sat", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(layout, "_has_solver", lambda: False)
    blocks = some_blocks(3)
    assert laid_out(blocks) == greedy(blocks)
    tight = pieces(1, 100)
    assert not greedy(tight).is_best
    assert laid_out(tight, 60.0).is_best
    with pytest.raises(UsageError, match=r"stormd\[solver\]"):
        improved(blocks, greedy(blocks), 1.0)


@pytest.mark.parametrize("values", [(3, 3, 1), (3, 2, 1), (0, 1, -1), (0, 1, 1, 0)])
def test_what_is_no_block_is_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="no block"):
        Block(*values)
