"""The constants of the ANCF format, version 1, each defined only here.

FORMAT.md explains them. Tests check that the C and CUDA headers have the same values. To change a
constant changes the bytes of blobs, so it needs a new `VERSION`.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "BITMAP_NONE",
    "BITMAP_PAIRS",
    "BITMAP_PLAIN",
    "BITMAP_SIGNS",
    "CHECK_CHUNK_BYTES",
    "CHECK_INDEX",
    "CHECK_KEYS",
    "CHECK_LENGTH",
    "CHECK_MIX",
    "DIRECTORY_ALIGN",
    "FLAG_CHECKSUM",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_RECORDS_BYTES",
    "RECORD_UNIT",
    "SAMPLE_MAX",
    "SAMPLE_RUN",
    "SAMPLE_RUNS",
    "TILE",
    "TRAILER_MAGIC",
    "VERSION",
    "WINDOW_SLOTS",
    "Mode",
]

MAGIC = b"ANCF"
TRAILER_MAGIC = b"ANCS"
VERSION = 1
HEADER_BYTES = 256
TILE = 4096  # elements
DIRECTORY_ALIGN = 128  # bytes: dictionary, directory and fixed blocks start at multiples of it
RECORD_UNIT = 8  # bytes: the unit of directory entries
MAX_RECORDS_BYTES = 1 << 35  # a blob's payload is smaller: a directory entry is a u32
FLAG_CHECKSUM = 1
BITMAP_NONE, BITMAP_PLAIN, BITMAP_PAIRS = 0, 1, 2
BITMAP_SIGNS = 4  # flag, added to a kind: a plane of all signs follows the bitmap
WINDOW_SLOTS = 32  # u16 entries of the dictionary in the header

SAMPLE_MAX = 16384  # elements
SAMPLE_RUN = 32  # neighbouring elements
SAMPLE_RUNS = SAMPLE_MAX // SAMPLE_RUN

# The checksum's constants: splitmix64 from state 0, made odd. Outputs 0..15 give the upper
# halves of the word keys, 16..18 the three 64-bit multipliers.
CHECK_CHUNK_BYTES = 2048
CHECK_KEYS = (
    0xE220A839, 0x6E789E6B, 0x06C45D19, 0xF88BB8A9,
    0x1B39896B, 0x53CB9F0D, 0x2C829ABF, 0xC584133B,
    0x3EE57891, 0xF3B8488D, 0x657EECDD, 0xC2D326E1,
    0x8621A03F, 0x8E1F7555, 0xB54E0F17, 0x84BB3F97,
)  # fmt: skip
CHECK_INDEX = 0x7D29825C75521255  # C1
CHECK_MIX = 0xC3CF17102B7F7F87  # C2
CHECK_LENGTH = 0x3466E9A083914F65  # C3


class Mode(IntEnum):
    """How a blob's tiles are coded; the value is the header's mode byte."""

    RAW = 0
    WINDOW = 1
    SPARSE = 2
    CONSTANT = 3
    BOOLEAN = 4
    TRUNCATED = 5
    TERNARY = 6
    VALUES = 7
    INTEGER = 8
