"""layout.py: the constants are the ones that FORMAT.md derives, and FORMAT.md names them."""

from __future__ import annotations

from pathlib import Path

from storm_kernels import ancf
from storm_kernels.ancf import layout

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


def test_the_sample_is_as_large_as_its_runs():
    assert layout.SAMPLE_RUN * layout.SAMPLE_RUNS == layout.SAMPLE_MAX


def test_format_lists_every_mode_and_dtype_with_its_number():
    for mode in layout.Mode:
        assert f"| {mode.value} | {mode.name.lower()} |" in FORMAT
    for dtype in ancf.DType:
        assert f"| {dtype.value} | {dtype.torch_name} |" in FORMAT or dtype.name == "BYTES"
