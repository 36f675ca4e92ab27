"""The layout of buffers in one memory: never two in one place, and as small as it can be."""

from __future__ import annotations

import random

import pytest
import storm_client as storm
from hypothesis import given
from hypothesis import strategies as some
from storm_client.compile import layout
from storm_client.compile.layout import Buffer, lay_out, lower_bound

BUFFERS = some.lists(
    some.builds(
        lambda first, life, nbytes: Buffer(first, first + life, nbytes),
        some.integers(0, 20),
        some.integers(0, 10),
        some.integers(0, 50),
    ),
    max_size=12,
)


def cut(seed: int, height: int, length: int, count: int) -> list[Buffer]:
    """Cut a full rectangle into buffers: its height is the size of the best layout."""
    chance = random.Random(seed)
    pieces = [(0, length, height)]
    while len(pieces) < count:
        number = chance.randrange(len(pieces))
        first, end, nbytes = pieces[number]
        if chance.random() < 0.5 and end - first > 1:
            at = chance.randrange(first + 1, end)
            pieces[number : number + 1] = [(first, at, nbytes), (at, end, nbytes)]
        elif nbytes > 1:
            part = chance.randrange(1, nbytes)
            pieces[number : number + 1] = [(first, end, part), (first, end, nbytes - part)]
    chance.shuffle(pieces)
    return [Buffer(*piece) for piece in pieces]


@given(BUFFERS, some.sampled_from([1, 16]))
def test_no_two_buffers_share_a_byte(buffers: list[Buffer], alignment: int) -> None:
    found = lay_out(buffers, seconds=0.0, alignment=alignment)
    found.assert_invariants(buffers)
    assert found.nbytes >= found.lower_bound >= lower_bound(buffers)
    assert all(offset % alignment == 0 for offset in found.offsets)


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_rectangle_is_put_together_again(seed: int) -> None:
    pytest.importorskip("ortools")
    buffers = cut(seed, height=1000, length=40, count=30)
    found = lay_out(buffers, seconds=60.0)
    found.assert_invariants(buffers)
    assert found.nbytes == found.lower_bound == 1000
    assert found.is_optimal


def test_what_orders_do_not_find_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools")
    monkeypatch.setattr(layout, "MOST_TRIES", 0)
    buffers = cut(2, height=1000, length=40, count=60)
    start = lay_out(buffers, seconds=0.0)
    found = lay_out(buffers, seconds=60.0)
    found.assert_invariants(buffers)
    assert start.nbytes > found.nbytes == 1000


@pytest.mark.parametrize("seed", range(4))
def test_a_search_alone_comes_close(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda _: None)
    buffers = cut(seed, height=1000, length=40, count=25)
    found = lay_out(buffers, seconds=60.0)
    found.assert_invariants(buffers)
    assert found.nbytes <= 1.1 * found.lower_bound


def test_a_step_is_packed_to_the_bound() -> None:
    """Forward, values are stored one after the other; backward they go in the opposite order."""
    count = 100
    buffers = [Buffer(n, 2 * count - n, 100 + n % 7) for n in range(count)]
    found = lay_out(buffers, seconds=60.0)
    found.assert_invariants(buffers)
    assert found.is_optimal


def test_the_same_search_ends_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "find_spec", lambda _: None)
    monkeypatch.setattr(layout, "MOST_TRIES", 200)
    buffers = cut(7, height=500, length=30, count=40)
    assert lay_out(buffers, seconds=60.0, seed=3) == lay_out(buffers, seconds=60.0, seed=3)


def test_nothing_takes_no_memory() -> None:
    assert lay_out([]).nbytes == 0


@pytest.mark.parametrize(
    ("buffers", "alignment", "message"),
    [
        ([Buffer(3, 2, 1)], 1, "buffer 0"),
        ([Buffer(0, 1, 1), Buffer(0, 1, -1)], 1, "buffer 1"),
        ([], 0, "alignment is 0"),
    ],
)
def test_what_makes_no_sense_is_named(buffers: list[Buffer], alignment: int, message: str) -> None:
    with pytest.raises(storm.UsageError, match=message):
        lay_out(buffers, alignment=alignment)
