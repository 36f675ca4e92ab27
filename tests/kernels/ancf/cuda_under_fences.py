"""Runs the CUDA kernels on the CPU, every buffer against pages that nobody may touch.

    python tests/kernels/ancf/cuda_under_fences.py FOLDER DTYPE

Run as a process of its own: a step outside a buffer, an access that its type's alignment forbids
on a device, or a shift by a word's bits or more, which a device takes otherwise, ends it by a
signal. Libraries that FOLDER lacks are built into it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from storm_kernels.ancf import DType, reference
from storm_kernels.ancf.checksum import checksum, from_sums
from storm_kernels.ancf.layout import CHECK_MIX
from support.cuda_on_cpu import OK, Kernels, build_kernels
from support.fenced_memory import Fenced

COUNTS = (31, 1025, 9001)
MODES = ("window", "sparse", "truncated", "values", "ternary", "integer", "raw")
HEADER_BYTES, CHECKED_BYTES = 256, 248
DAMAGED = 6  # of each blob


def tensors(dtype: DType, count: int) -> Iterator[np.ndarray]:
    """Bytes of dense, half empty, nearly empty, wide and narrow tensors."""
    rng = np.random.default_rng(count)
    normal = rng.standard_normal(count)
    wide = normal * 10.0 ** rng.uniform(-12, 12, count)
    for values in (normal, np.maximum(normal, 0), normal * (rng.random(count) < 0.1), wide):
        words = values.astype(np.float32).view(np.uint32)
        narrow = (words & np.uint32(0xFFFF0000)).view(np.float32)
        if dtype.element_bytes == 8:
            yield from (values.view(np.uint8), narrow.astype(np.float64).view(np.uint8))
        elif dtype.element_bytes == 4:
            yield from (words.view(np.uint8), narrow.view(np.uint8))
        else:
            kept = words >> (32 - 8 * dtype.element_bytes)
            yield kept.astype(f"<u{dtype.element_bytes}").view(np.uint8)


def seal(blob: np.ndarray) -> None:
    """Make the header's check right again, so that what else is wrong must be found."""
    check = 0
    for word in blob[:CHECKED_BYTES].view(np.uint64).tolist():
        check = (check ^ word) * CHECK_MIX % (1 << 64)
        check ^= check >> 29
    blob[CHECKED_BYTES:HEADER_BYTES].view(np.uint64)[0] = check


def damaged(blob: np.ndarray, tiles: int, rng: np.random.Generator) -> np.ndarray:
    """Change bits of the header, of the directory or anywhere, or a run of bytes."""
    made = blob.copy()
    ends = (HEADER_BYTES, HEADER_BYTES + 4 * (tiles + 1), blob.size)
    end = min(int(rng.choice(ends)), blob.size)
    for place in rng.integers(0 if end == HEADER_BYTES else HEADER_BYTES - 1, end, 2):
        made[place] ^= 1 << rng.integers(8)
    if rng.random() < 0.5:  # a long run of ones makes escapes that no record has
        start = int(rng.integers(HEADER_BYTES - 1, blob.size))
        made[start : start + int(rng.choice([64, 2000]))] = rng.choice([0, 255])
    if rng.random() < 0.7:
        seal(made)
    return made


def check(kernels: Kernels, data: np.ndarray, dtype: DType, **options) -> int:
    """Code `data`, decode it, decode damaged blobs; return how many decodes that took."""
    rng = np.random.default_rng(data.size)
    offset = int(rng.choice([0, dtype.element_bytes]))
    expected = reference.encode(data, dtype, **options)
    blob = kernels.encode(data, dtype, offset=offset, **options)
    assert blob.tobytes() == expected.tobytes()
    (sums,) = kernels.check([data], blocks=2, offset=offset)
    assert from_sums(sums.tolist(), data.size) == checksum(data)
    status, same = kernels.decode(expected, data.size, offset=offset)
    assert status == OK
    assert (same == data).all()
    tiles = data.size // dtype.element_bytes // 4096 + 1
    for _ in range(DAMAGED):
        status, out = kernels.decode(damaged(blob, tiles, rng), data.size, offset=offset)
        assert status != OK or not options["checksum"] or (out == data).all()
    return 1 + DAMAGED


def main() -> None:
    folder, dtype = Path(sys.argv[1]), DType[sys.argv[2]]
    kernels = build_kernels(folder, dtype, Fenced)
    done = 0
    for number, count in enumerate(COUNTS):
        for kind, data in enumerate(tensors(dtype, count)):
            mode = ("auto", MODES[(number + kind) % len(MODES)])[kind % 2]
            for speed in ("fast", "dense"):
                done += check(kernels, data, dtype, mode=mode, speed=speed, checksum=bool(kind % 3))
    print(f"{done} blobs decoded")


if __name__ == "__main__":
    main()
