"""layout.py: the constants are FORMAT.md's, and the headers of C and CUDA have the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from storm_kernels import ancf
from storm_kernels.ancf import layout

MASK = (1 << 64) - 1
ANCF = Path(ancf.__file__).parent
C_HEADER = ANCF / "csrc" / "format.h"
CUDA_HEADER = ANCF / "csrc" / "cuda" / "ancf_format.cuh"
FORMAT = (ANCF / "FORMAT.md").read_text()


def splitmix64(count: int) -> list[int]:
    state, outputs = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def test_checksum_constants_are_derived_as_the_format_says():
    outputs = splitmix64(19)
    assert tuple((z >> 32) | 1 for z in outputs[:16]) == layout.CHECK_KEYS
    assert [z | 1 for z in outputs[16:]] == [
        layout.CHECK_INDEX,
        layout.CHECK_MIX,
        layout.CHECK_LENGTH,
    ]
    assert len(set(layout.CHECK_KEYS)) == 16


def test_format_lists_every_mode_and_dtype_with_its_number():
    for mode in layout.Mode:
        assert f"| {mode.value} | {mode.name.lower()} |" in FORMAT
    for dtype in ancf.DType:
        assert f"| {dtype.value} | {dtype.torch_name} |" in FORMAT or dtype.name == "BYTES"


NUMBERS = {  # ours: C's, CUDA's
    "VERSION": ("ANCF_VERSION", "kVersion"),
    "HEADER_BYTES": ("ANCF_HEADER_BYTES", "kHeaderBytes"),
    "TILE": ("ANCF_TILE", "kTile"),
    "DIRECTORY_ALIGN": ("ANCF_ALIGN", "kDirectoryAlign"),
    "WINDOW_SLOTS": ("ANCF_WINDOW_SLOTS", "kWindowSlots"),
    "SAMPLE_MAX": ("ANCF_SAMPLE", "kSampleMax"),
    "SAMPLE_RUN": ("ANCF_SAMPLE_RUN", "kSampleRun"),
    "CHECK_CHUNK_BYTES": ("ANCF_CHUNK_BYTES", "kCheckChunkBytes"),
    "CHECK_INDEX": ("ANCF_C1", "kCheckIndex"),
    "CHECK_MIX": ("ANCF_C2", "kCheckMix"),
    "CHECK_LENGTH": ("ANCF_C3", "kCheckLength"),
    "FLAG_CHECKSUM": ("ANCF_FLAG_CHECKSUM", "kFlagChecksum"),
    "BITMAP_PLAIN": ("ANCF_PLAIN", "kBitmapPlain"),
    "BITMAP_PAIRS": ("ANCF_PAIRS", "kBitmapPairs"),
    "BITMAP_SIGNS": ("ANCF_SIGNS", "kBitmapSigns"),
}


def number_in(header: str, name: str) -> int:
    """Return the integer that `header` gives `name`, in C's or in C++'s way."""
    found = re.search(rf"\b{name}\b\s*=?\s*(?:UINT64_C\()?(0[xX][0-9A-Fa-f]+|\d+)", header)
    assert found, f"{name} is not in the header"
    return int(found[1], 0)


@pytest.mark.parametrize("path", [C_HEADER, CUDA_HEADER], ids=["C", "CUDA"])
def test_headers_have_the_same_numbers(path):
    text = path.read_text()
    for name, both in NUMBERS.items():
        assert number_in(text, both[path is CUDA_HEADER]) == getattr(layout, name)
    magic = "ANCF_MAGIC" if path is C_HEADER else "kMagic"
    assert number_in(text, magic).to_bytes(4, "little") == layout.MAGIC
    keys = re.search(r"\{((?:[\s\\]*0x[0-9A-Fa-f]{8},?){16})", text)
    assert tuple(int(k, 16) for k in re.findall(r"0x\w{8}", keys[1])) == layout.CHECK_KEYS
    for mode in layout.Mode:
        name = f"ANCF_{mode.name}" if path is C_HEADER else f"k{mode.name.capitalize()}"
        assert number_in(text, name) == mode
