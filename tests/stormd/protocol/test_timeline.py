"""The timeline page's counters only rise, and both mappings of a page see the same."""

import ctypes

from stormd.protocol.timeline import (
    PAGE_BYTES,
    POISON,
    PUBLISHED,
    STORED,
    Timelines,
)


def page() -> tuple[ctypes.Array, Timelines, Timelines]:
    memory = (ctypes.c_uint64 * (PAGE_BYTES // 8))()
    address = ctypes.addressof(memory)
    return memory, Timelines(address), Timelines(address)


def test_a_counter_never_decreases() -> None:
    _memory, one, _ = page()
    one.store(STORED, 9)
    one.store(STORED, 3)
    assert one.read(STORED) == 9


def test_poison_is_above_every_value_and_stays() -> None:
    _memory, one, other = page()
    one.store(STORED, POISON - 1)
    one.poison(STORED)
    other.store(STORED, 12)
    assert other.read(STORED) == POISON
    assert other.read(PUBLISHED) == 0
    assert POISON < 1 << 63
