"""Layouts: no two temporaries overlap while both are needed, and sizes are near the bound."""

from __future__ import annotations

import random

import pytest
from storm_client.step.layout import Layout, laid_out
from storm_client.step.temporaries import Temporary, most_at_once


def some(seed: int, count: int = 60) -> list[Temporary]:
    chosen = random.Random(seed)
    found = []
    for number in range(count):
        begin = chosen.randrange(1, 100)
        size = chosen.choice([1, 100, 4096, chosen.randrange(1, 5000)])
        found.append(Temporary("made", number, begin, begin + chosen.randrange(1, 30), size))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_two_share_a_byte_at_any_time(seed: int) -> None:
    temporaries = some(seed)
    found = laid_out(temporaries)
    found.assert_invariants(temporaries)
    assert found.bound == most_at_once(temporaries) <= found.nbytes
    assert found.nbytes <= 1.35 * found.bound + 64 * len(temporaries)


def test_what_shares_a_byte_is_noticed() -> None:
    temporaries = [Temporary("a", 0, 0, 2, 100), Temporary("b", 1, 1, 3, 100)]
    Layout((0, 128), 228, 200).assert_invariants(temporaries)
    for offsets in ((0, 64), (64, 0), (0, 0)):
        with pytest.raises(AssertionError):
            Layout(offsets, 228, 200).assert_invariants(temporaries)
    with pytest.raises(AssertionError):
        Layout((0, 128), 227, 200).assert_invariants(temporaries)


def test_nothing_needs_no_buffer() -> None:
    assert laid_out([]) == Layout((), 0, 0)
