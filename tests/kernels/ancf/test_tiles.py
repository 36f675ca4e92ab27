"""tiles.py: bits stand where FORMAT.md puts them, for one tile at a time."""

from __future__ import annotations

import numpy as np
import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode
from storm_kernels.ancf.plan import Plan
from storm_kernels.ancf.tiles import TileCoder, pack_planes, unpack_planes


@pytest.mark.parametrize("bits", [0, 1, 7, 8, 11, 16, 24, 31, 32, 53, 63, 64])
def test_planes_hold_the_low_bits_of_each_value(bits):
    values = np.random.default_rng(bits).integers(0, 1 << 64, 90, np.uint64)
    planes = pack_planes(values, bits, 96)
    assert planes.size == 96 * bits // 8
    mask = np.uint64((1 << bits) - 1)
    assert (unpack_planes(planes, bits, 96, 90) == values & mask).all()


def test_bit_planes_count_from_the_lowest_bit():
    planes = pack_planes(np.array([1, 2, 3, 0, 0, 0, 0, 0, 1], np.uint64), 2, 32)
    assert planes.tolist() == [0b101, 1, 0, 0, 0b110, 0, 0, 0]


def test_wide_fields_start_with_words():
    planes = pack_planes(np.array([0x5_1234_89AB_CDEF], np.uint64), 53, 32)
    assert planes[:4].tobytes() == (0x89AB_CDEF).to_bytes(4, "little")
    assert planes[128:130].tobytes() == (0x1234).to_bytes(2, "little")
    assert [int(plane[0]) for plane in planes[192:].reshape(5, 4)] == [1, 0, 1, 0, 0]


def test_bfloat16_splits_into_exponent_and_a_byte():
    plan = Plan(Mode.WINDOW, 0, 1, 0, 8, 3, 0, 0, (0x7F,))
    block, record = TileCoder(plan, DType.BFLOAT16).encode(np.array([0xBF81, 0x4000], "<u2"))
    assert block[:2].tolist() == [0x03, 0x00]  # mantissa 1 and sign; nothing
    assert [int(plane[0]) for plane in block[128:].reshape(3, 16)] == [0b10] * 3
    assert record.tolist() == [0x80]


def test_second_level_and_escapes_follow_each_other():
    plan = Plan(Mode.WINDOW, 0, 1, 0, 8, 2, 3, 0, (10, 11, 12, 20, 21))
    tile = np.array([21, 12, 99, 20], "<u2") << 7
    block, record = TileCoder(plan, DType.BFLOAT16).encode(tile)
    assert [int(plane[0]) for plane in block[128:].reshape(2, 16)] == [0b1101, 0b1111]
    assert record.tolist() == [0b011, 0b010, 0b010, 99]


def test_pairs_of_a_bitmap():
    plan = Plan(Mode.SPARSE, 2, 1, 0, 8, 2, 3, 0, (1,))
    tile = np.array([0, 0, 1, 0, 0, 1, 1, 1], "<u2") << 7
    block, record = TileCoder(plan, DType.BFLOAT16).encode(tile)
    assert block[0] == 0b1110
    assert record[0] == 0b110
    assert record[4] == 0b10


@pytest.mark.parametrize(("bitmap", "signs_at"), [(5, 16), (6, 16)])
def test_signs_follow_the_bitmap(bitmap, signs_at):
    plan = Plan(Mode.SPARSE, bitmap, 0, 0, 7, 2, 3, 0, (1,))
    tile = np.array([0x8000, 0x0080, 0x8085, 0, 0x8000], "<u2")
    coder = TileCoder(plan, DType.BFLOAT16)
    block, record = coder.encode(tile)
    assert block.size == 32
    assert block[0] == (0b00110 if bitmap == 5 else 0b011)
    assert block[signs_at] == 0b10101
    planes = record[0 if bitmap == 5 else 8 :]
    assert [int(plane[0]) for plane in planes[:28].reshape(7, 4)] == [2, 0, 2, 0, 0, 0, 0]
    assert coder.decode(block, record, 5).tolist() == tile.tolist()


def test_records_that_are_too_short_are_refused():
    plan = Plan(Mode.WINDOW, 0, 1, 0, 8, 2, 3, 0, (1,))
    coder = TileCoder(plan, DType.BFLOAT16)
    block, record = coder.encode(np.arange(0, 40_000, 128, dtype="<u2"))
    for size in range(record.size):
        with pytest.raises(ancf.CorruptBlob, match=f"has {size} bytes"):
            coder.decode(block, record[:size], 313)


def test_integers_wider_than_their_type_are_refused():
    coder = TileCoder(Plan(Mode.INTEGER), DType.INT16)
    _, record = coder.encode(np.arange(100, dtype="<u2"))
    record[8] = 17
    with pytest.raises(ancf.CorruptBlob, match="17 bits"):
        coder.decode(record[:0], record, 100)
