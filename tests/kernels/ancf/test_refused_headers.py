"""Headers that no encoder writes are refused by every decoder (FORMAT.md, section 12).

Each header here has a check that is right, so that what is wrong with it must be seen itself. The
CUDA decoder runs on the CPU (tests/kernels/cuda_on_cpu).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode, reference
from storm_kernels.ancf.header import Header, header_check
from storm_kernels.ancf.plan import Plan
from support.cuda_on_cpu import BAD_HEADER, OK

from .conftest import CODECS

FLAGS, BITMAP, TOTAL, CHECKSUM, FILL, TILES = 8, 9, 24, 32, 40, 48
DICT_COUNT, PAYLOAD, ZERO = 52, 72, 144
NBYTES = 18_000

Refuses = Callable[[np.ndarray, DType], bool]


@pytest.fixture(params=[*CODECS, "cuda"])
def refuses(request: pytest.FixtureRequest) -> Refuses:
    """Whether a decoder calls a blob of NBYTES original bytes corrupt; it decodes it otherwise."""
    if request.param == "cuda":
        kernels = request.getfixturevalue("kernels")

        def by_status(blob: np.ndarray, dtype: DType) -> bool:
            status, _ = kernels(dtype).decode(blob, NBYTES)
            assert status in {OK, BAD_HEADER}
            return status == BAD_HEADER

        return by_status
    codec = CODECS[request.param]

    def by_error(blob: np.ndarray, dtype: DType) -> bool:
        try:
            codec.decode(blob, NBYTES)
        except ancf.CorruptBlob:
            return True
        return False

    return by_error


def blob_in(mode: str, dtype: DType = DType.BFLOAT16) -> np.ndarray:
    """A blob in that mode and no other."""
    rng = np.random.default_rng(1)
    count = NBYTES // dtype.element_bytes
    if mode == "boolean":
        data = (rng.random(count) < 0.5).astype(f"<u{dtype.element_bytes}").view(np.uint8)
    elif mode == "constant":
        data = np.full(count, 3, f"<u{dtype.element_bytes}").view(np.uint8)
    elif dtype is DType.FLOAT32:
        data = (rng.standard_normal(count).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(
            np.uint8
        )
    else:
        values = (rng.integers(0x3F70, 0x3F90, count) * (rng.random(count) < 0.3)).astype("<u2")
        data = values.view(np.uint8)
    blob = reference.encode(data, dtype, mode=mode, checksum=False)
    assert ancf.read_header(blob).mode is Mode[mode.upper()]
    return blob


def changed(blob: np.ndarray, at: int, width: int, value: int) -> np.ndarray:
    """`blob` with another number in its header, and a check that is right again."""
    made = blob.copy()
    made[at : at + width] = np.frombuffer(value.to_bytes(width, "little"), np.uint8)
    made[248:256] = np.frombuffer(
        header_check(made[:248].tobytes()).to_bytes(8, "little"), np.uint8
    )
    return made


EVERY_MODE = [(mode.name.lower(), DType.BFLOAT16) for mode in Mode if mode is not Mode.TRUNCATED]
EVERY_MODE.append(("truncated", DType.FLOAT32))


def test_fills(refuses):
    for mode, dtype in EVERY_MODE:
        assert not refuses(changed(blob_in(mode, dtype), FLAGS, 1, 0), dtype), mode
        wide = 1 << 16 if mode in {"sparse", "constant"} else 1  # others have none
        assert refuses(changed(blob_in(mode, dtype), FILL, 8, wide), dtype), mode


def with_signs_apart(rotate: int, fill: int) -> np.ndarray:
    """A blob without kept elements and without records, with these fields in its header."""
    plan = Plan(Mode.SPARSE, 5, rotate, 0, 7 + rotate, 2, 3, fill)
    header = Header(plan, DType.BFLOAT16, NBYTES, 0, None)
    blob = np.zeros(header.encoded_nbytes, np.uint8)
    blob[:256] = np.frombuffer(header.pack(), np.uint8)
    return blob


def test_signs_apart_of_rotated_elements_or_beside_a_fill(refuses):
    assert not refuses(with_signs_apart(rotate=0, fill=0), DType.BFLOAT16)
    assert refuses(with_signs_apart(rotate=1, fill=0), DType.BFLOAT16)
    assert refuses(with_signs_apart(rotate=0, fill=1), DType.BFLOAT16)


def test_records_in_modes_without_a_directory(refuses):
    for mode in ("raw", "constant", "boolean"):
        blob = blob_in(mode)
        longer = np.concatenate([blob, np.zeros(8, np.uint8)])
        longer = changed(changed(longer, TOTAL, 8, longer.size), PAYLOAD, 8, 8)
        assert refuses(longer, DType.BFLOAT16), mode


def test_numbers_that_contradict_each_other(refuses):
    for mode, dtype in EVERY_MODE:
        blob = blob_in(mode, dtype)
        for at, width, value in (
            (TOTAL, 8, blob.size + 8),
            (PAYLOAD, 8, 1 << 35),
            (CHECKSUM, 8, 1),
            (FLAGS, 1, 2),
            (BITMAP, 1, 3),
            (BITMAP, 1, 7),
            (TILES, 4, 77),
            (DICT_COUNT, 4, 512),
            (ZERO, 1, 1),
        ):
            assert refuses(changed(blob, at, width, value), dtype), (mode, at, value)
