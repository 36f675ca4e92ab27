"""What is held back: the newest sources, up to a limit; the oldest goes first."""

from __future__ import annotations

import torch
from storm_client.held import HeldBack
from storm_client.records import StoredRange
from storm_client.window import Window
from support.records import record_of


def window(limit: int) -> Window:
    window = Window(1 << 40)
    window.limit = limit
    return window


def record(nbytes: int) -> StoredRange:
    return record_of(torch.empty(nbytes, dtype=torch.uint8))


def test_the_oldest_goes_when_there_is_more_than_the_limit() -> None:
    held: HeldBack[str] = HeldBack(window(250))
    records = [record(100) for _ in range(3)]
    for number, one in enumerate(records):
        assert held.excess() is None
        held.add(one, number, f"admission {number}")
    excess = held.excess()
    assert excess is not None
    assert excess.record() is records[0]
    assert (excess.sequence, excess.admission, excess.nbytes) == (0, "admission 0", 100)
    held.forget(excess.key)
    assert held.excess() is None
    assert [one.key in held for one in records] == [False, True, True]


def test_the_whole_storage_counts() -> None:
    held: HeldBack[None] = HeldBack(window(99))
    one = record_of(torch.empty(100, dtype=torch.uint8), (0, 64))
    held.add(one, 1, None)
    assert held.nbytes == 100
    assert held.excess() is not None


def test_what_is_forgotten_counts_no_more() -> None:
    held: HeldBack[None] = HeldBack(window(99))
    one = record(100)
    held.add(one, 1, None)
    for _ in range(2):
        held.forget(one.key)
    assert (held.nbytes, len(held), held.excess()) == (0, 0, None)


def test_a_record_is_not_kept_alive() -> None:
    held: HeldBack[None] = HeldBack(window(0))
    held.add(record(8), 1, None)
    excess = held.excess()
    assert excess is not None
    assert excess.record() is None
