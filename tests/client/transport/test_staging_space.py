from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storm_client.lanes import Slot
from storm_client.transport import staging_space
from storm_client.transport.staging_space import ALIGNMENT, StagingSpace

TraceFunction = Callable[[FrameType, str, Any], Any]


def taken(space: StagingSpace, nbytes: int) -> Slot:
    slot = space.allocate(nbytes)
    assert slot is not None
    return slot


def test_what_was_not_handed_out_cannot_be_freed() -> None:
    space = StagingSpace(1024)
    with pytest.raises(KeyError):
        space.free(Slot(64, 64))
    slot = taken(space, 64)
    space.free(slot)
    with pytest.raises(KeyError):
        space.free(slot)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=80), st.integers(0, 9000))
def test_the_area_is_whole_again_in_whatever_order_it_is_freed(
    events: list[tuple[bool, int]], nbytes: int
) -> None:
    space, used = StagingSpace(nbytes), []
    for is_allocation, number in events:
        if is_allocation:
            slot = space.allocate(number)
            if slot is not None:
                assert slot.offset % ALIGNMENT == 0
                assert slot.offset + number <= nbytes
                used.append(slot)
            del slot
        elif used:
            slot = used.pop(number % len(used))
            if number % 2:
                space.free(slot)
            del slot  # or lose it
        space.assert_invariants()
    used.clear()
    space.reclaim()
    space.assert_invariants()
    assert space.free_bytes == space.capacity
    if space.capacity:
        assert taken(space, space.capacity).offset == 0


def test_an_interrupt_hands_no_byte_out_twice() -> None:
    """Before whichever line of the module it comes."""
    for line in range(1, 200):
        space, held = StagingSpace(16 * ALIGNMENT), dict[int, Slot]()
        with suppress(KeyboardInterrupt), interrupted_in(staging_space.__file__, line):
            for _ in range(8):
                slot = taken(space, ALIGNMENT)
                held[slot.offset] = slot
            for offset in (0, 128, 64, 320):
                space.free(held.pop(offset))
        while (slot := space.allocate(ALIGNMENT)) is not None:
            assert slot.offset not in held
            held[slot.offset] = slot


@contextmanager
def interrupted_in(path: str, line: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the `line`th line of the file at `path` that is run."""
    lines = count(1)

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if frame.f_code.co_filename != path:
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
