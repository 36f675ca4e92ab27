"""header.py: packing and reading are inverses, and nothing else is read."""

from __future__ import annotations

import dataclasses

import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, Header, Mode, layout
from storm_kernels.ancf.checksum import header_check
from storm_kernels.ancf.header import HEAD_BYTES
from storm_kernels.ancf.plan import Plan

WINDOW = Plan(Mode.WINDOW, 0, 1, 0, 8, 3, 0, 0, (127, 126, 128))
EMPTY_WINDOW = Header(WINDOW, DType.BFLOAT16, 0, 0, None)
RAW = Header(Plan(Mode.RAW), DType.FLOAT32, 64, 0, 123)
TERNARY = Header(
    Plan(Mode.TERNARY, k1=2, dictionary=(0, 1, 1 << 63)), DType.FLOAT64, 8 * 4096, 40, 1
)


def blob_of(header: Header) -> bytearray:
    """Return a blob with that header; its other parts are zeros, but for a dictionary."""
    entries = header.plan.dictionary if header.plan.dictionary_is_apart else ()
    body = b"".join(entry.to_bytes(8, "little") for entry in entries)
    return bytearray((header.pack() + body).ljust(header.encoded_nbytes, b"\0"))


def reseal(blob: bytearray) -> bytearray:
    blob[248:256] = header_check(bytes(blob[:248])).to_bytes(8, "little")
    return blob


def test_reading_gives_back_what_was_packed():
    without, zero = (dataclasses.replace(RAW, checksum=one) for one in (None, 0))
    for header in (EMPTY_WINDOW, RAW, TERNARY, without, zero):
        assert len(header.pack()) == layout.HEADER_BYTES
        blob = blob_of(header)
        assert ancf.read_header(blob) == header
        assert ancf.read_header(blob[:HEAD_BYTES], len(blob)) == header
        for size in (0, 255, 256, len(blob) - 1, len(blob) + 1):
            if size != len(blob):
                with pytest.raises(ancf.CorruptBlob):
                    ancf.read_header(bytes(blob + b"\0")[:size])
        with pytest.raises(ancf.CorruptBlob):
            ancf.read_header(blob[:HEAD_BYTES], len(blob) + 1)


def test_every_flipped_bit_is_refused():
    blob = blob_of(RAW)
    for bit in range(8 * layout.HEADER_BYTES):
        blob[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ancf.CorruptBlob):
            ancf.read_header(blob)
        blob[bit // 8] ^= 1 << bit % 8
    assert ancf.read_header(blob) == RAW


def test_other_versions_and_other_files_are_told_apart():
    blob = blob_of(RAW)
    blob[4] = 2
    with pytest.raises(ancf.CorruptBlob, match="version 2"):
        ancf.read_header(blob)
    with pytest.raises(ancf.CorruptBlob, match="not an ANCF blob"):
        ancf.read_header(b"PNG!" + bytes(400))


def test_sealed_nonsense_is_refused():
    """A header whose check is right, but one byte of which no encoder would write."""
    for position in range(6, 248):
        blob = blob_of(TERNARY)
        blob[position] = 0xEE
        reseal(blob)
        if 32 <= position < 40:  # any checksum is possible
            ancf.read_header(blob)
            continue
        with pytest.raises(ancf.CorruptBlob):
            ancf.read_header(blob)


def test_plans_that_no_encoder_writes():
    for plan in (
        Plan(Mode.WINDOW, 0, 1, 0, 8, 2, 0),
        Plan(Mode.WINDOW, 1, 1, 0, 8, 3, 0),
        Plan(Mode.WINDOW, 0, 1, 0, 9, 3, 0),
        Plan(Mode.WINDOW, 0, 2, 0, 9, 3, 0),
        Plan(Mode.WINDOW, 0, 1, 16, 8, 3, 0),
        Plan(Mode.TRUNCATED, 0, 1, 16, 8, 2, 3),
        Plan(Mode.SPARSE, 0, 1, 0, 8, 2, 3),
        Plan(Mode.SPARSE, 3, 1, 0, 8, 2, 3),
        Plan(Mode.SPARSE, 4, 0, 0, 7, 2, 3),
        Plan(Mode.SPARSE, 5, 1, 0, 8, 2, 3),
        Plan(Mode.SPARSE, 6, 0, 0, 7, 2, 3, fill=1),
        Plan(Mode.WINDOW, 4, 0, 0, 7, 2, 3),
        Plan(Mode.VALUES, k1=10),
        Plan(Mode.VALUES, k1=8, k2=3),
        Plan(Mode.RAW, k1=3),
        Plan(Mode.CONSTANT, bitmap=1),
    ):
        assert plan.problem(DType.BFLOAT16), plan
