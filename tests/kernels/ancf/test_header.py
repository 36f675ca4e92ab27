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


@pytest.mark.parametrize("header", [EMPTY_WINDOW, RAW, TERNARY])
def test_reading_gives_back_what_was_packed(header):
    assert len(header.pack()) == layout.HEADER_BYTES
    assert ancf.read_header(blob_of(header)) == header


def test_numbers_stand_where_the_format_says():
    head = TERNARY.pack()
    assert head[:4] == b"ANCF"
    assert head[6:8] == bytes([Mode.TERNARY, DType.FLOAT64])
    assert int.from_bytes(head[16:24], "little") == 8 * 4096
    assert int.from_bytes(head[24:32], "little") == TERNARY.encoded_nbytes
    assert int.from_bytes(head[32:40], "little") == 1
    assert int.from_bytes(head[52:56], "little") == 3


def test_every_flipped_bit_is_refused():
    blob = blob_of(RAW)
    for bit in range(8 * layout.HEADER_BYTES):
        blob[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ancf.CorruptBlob):
            ancf.read_header(blob)
        blob[bit // 8] ^= 1 << bit % 8
    assert ancf.read_header(blob) == RAW


@pytest.mark.parametrize("position", range(6, 248))
def test_sealed_nonsense_is_refused(position):
    """A header whose check is right, but one byte of which no encoder would write."""
    blob = blob_of(TERNARY)
    blob[position] = 0xEE
    reseal(blob)
    if 32 <= position < 40:  # any checksum is possible
        ancf.read_header(blob)
        return
    with pytest.raises(ancf.CorruptBlob):
        ancf.read_header(blob)


def test_other_versions_and_other_files_are_told_apart():
    blob = blob_of(RAW)
    blob[4] = 2
    with pytest.raises(ancf.CorruptBlob, match="version 2"):
        ancf.read_header(blob)
    with pytest.raises(ancf.CorruptBlob, match="not an ANCF blob"):
        ancf.read_header(b"PNG!" + bytes(400))


@pytest.mark.parametrize("size", [0, 255, 256, 319, 321])
def test_other_sizes_are_refused(size):
    blob = bytes(blob_of(RAW))
    with pytest.raises(ancf.CorruptBlob):
        ancf.read_header((blob + b"\0")[:size])


def test_absent_checksum_is_told_from_zero():
    zero = dataclasses.replace(RAW, checksum=0)
    absent = dataclasses.replace(RAW, checksum=None)
    assert ancf.read_header(blob_of(zero)).checksum == 0
    assert ancf.read_header(blob_of(absent)).checksum is None


@pytest.mark.parametrize("header", [EMPTY_WINDOW, RAW, TERNARY])
def test_the_first_bytes_are_enough(header):
    blob = blob_of(header)
    assert ancf.read_header(blob[:HEAD_BYTES], len(blob)) == header
    with pytest.raises(ancf.CorruptBlob):
        ancf.read_header(blob[:HEAD_BYTES], len(blob) + 1)
