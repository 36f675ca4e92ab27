"""What is held back: the newest sources, up to a limit; the oldest goes first."""

from __future__ import annotations

import weakref

import torch
from storm_client.held import Held, HeldBack
from storm_client.records import StoredRange
from storm_client.window import Window
from support.records import record_of


def window(limit: int) -> Window:
    window = Window(1 << 40)
    window.limit = limit
    return window


def record(nbytes: int) -> StoredRange:
    return record_of(torch.empty(nbytes, dtype=torch.uint8))


def hold(held: HeldBack[str], one: StoredRange, number: int) -> None:
    held.add(
        Held(
            one.key,
            weakref.ref(one),
            one.nbytes,
            f"admission {number}",
            number,
        )
    )


def test_the_oldest_goes_when_there_is_more_than_the_limit() -> None:
    held: HeldBack[str] = HeldBack(window(250))
    records = [record(100) for _ in range(3)]
    for number, one in enumerate(records):
        assert held.excess() is None
        hold(held, one, number)
    excess = held.excess()
    assert excess is not None
    assert excess.record() is records[0]
    assert (excess.sequence, excess.admission, excess.nbytes) == (0, "admission 0", 100)
    held.forget(excess.key)
    assert held.excess() is None
    assert [one.key in held for one in records] == [False, True, True]


def test_what_is_forgotten_counts_no_more() -> None:
    held: HeldBack[str] = HeldBack(window(99))
    one = record(100)
    hold(held, one, 1)
    for _ in range(2):
        held.forget(one.key)
    assert (held.nbytes, len(held), held.excess()) == (0, 0, None)


def test_a_record_is_not_kept_alive() -> None:
    held: HeldBack[str] = HeldBack(window(0))
    hold(held, record(8), 1)
    excess = held.excess()
    assert excess is not None
    assert excess.record() is None
