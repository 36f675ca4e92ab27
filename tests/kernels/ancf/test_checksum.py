"""checksum.py against the definition written out, and the damage it must notice."""

from __future__ import annotations

import numpy as np
from storm_kernels.ancf import layout
from storm_kernels.ancf.checksum import checksum, header_check

MASK = (1 << 64) - 1


def by_definition(data: bytes, first_chunk: int = 0) -> int:
    """Return the sum of all columns, and the length's share."""
    padded = data + bytes(-len(data) % 2048)
    total = len(data) * layout.CHECK_LENGTH
    for chunk in range(len(padded) // 2048):
        for column in range(32):
            total += mixed(padded[2048 * chunk :], first_chunk + chunk, column)
    return total & MASK


def mixed(chunk: bytes, index: int, column: int) -> int:
    s = 0
    for row in range(4):
        for q in range(4):
            at = 4 * (128 * row + 4 * column + q)
            s += int.from_bytes(chunk[at : at + 4], "little") * layout.CHECK_KEYS[4 * row + q]
    h = (s ^ ((32 * index + column) * layout.CHECK_INDEX)) & MASK
    h ^= h >> 32
    h = (h * layout.CHECK_MIX) & MASK
    return h ^ (h >> 29)


def test_checksum_follows_the_definition():
    for size in (0, 1, 3, 4, 17, 2047, 2048, 2049, 10_000):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        assert checksum(data) == by_definition(data.tobytes()), size


def test_checksum_does_not_depend_on_how_it_is_batched():
    data = np.random.default_rng(0).integers(0, 256, (4 << 20) + 2048 * 3 + 5, np.uint8)
    whole = data.size // 2048 * 2048
    tail = by_definition(data[whole:].tobytes(), first_chunk=whole // 2048)
    assert checksum(data) == (checksum(data[:whole]) + tail) & MASK


def test_every_change_is_noticed():
    data = bytearray(np.random.default_rng(1).integers(0, 256, 248, np.uint8).tobytes())
    for check in (header_check, lambda head: checksum(np.frombuffer(head, np.uint8))):
        seen = {check(bytes(data))}
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            seen.add(check(bytes(data)))
            data[bit // 8] ^= 1 << bit % 8
        assert len(seen) == 8 * len(data) + 1
    pieces = np.random.default_rng(2).integers(0, 256, 3 * 2048, np.uint8)
    for step in (4, 16, 512, 2048):
        swapped = np.concatenate([pieces[step : 2 * step], pieces[:step], pieces[2 * step :]])
        assert checksum(swapped) != checksum(pieces), step
    assert len({checksum(np.zeros(size, np.uint8)) for size in range(100)}) == 100
