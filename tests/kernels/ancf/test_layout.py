"""layout.py and dtypes.py: the constants are FORMAT.md's, the element types torch's."""

from __future__ import annotations

from pathlib import Path

import torch
from storm_kernels import ancf
from storm_kernels.ancf import DType, dtype_of, layout

MASK = (1 << 64) - 1
FORMAT = (Path(ancf.__file__).parent / "FORMAT.md").read_text()


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


def test_torch_agrees():
    for dtype in set(DType) - {DType.BYTES}:
        theirs = getattr(torch, dtype.torch_name)
        assert dtype_of(theirs) is dtype
        assert dtype.item_bytes == theirs.itemsize
        assert dtype.is_complex == theirs.is_complex
        assert dtype.is_float == (theirs.is_floating_point or theirs.is_complex)
        integer = not dtype.is_float and theirs is not torch.bool
        assert dtype.is_signed_integer == (integer and theirs.is_signed)
        if dtype.is_float and not dtype.is_complex:
            assert 2.0**-dtype.mantissa_bits == torch.finfo(theirs).eps
