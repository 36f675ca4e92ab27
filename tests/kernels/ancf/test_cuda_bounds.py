"""The CUDA kernels touch nothing outside their buffers, and nothing misaligned, for any blob.

Nor do they shift a word by all of its bits, where devices and processors differ.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "cuda_under_fences.py"

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) here"),
    pytest.mark.skipif(sys.platform != "linux", reason="fences are made by Linux's mmap"),
]


@pytest.mark.parametrize(
    "dtype",
    [
        "BFLOAT16",
        pytest.param("FLOAT16", marks=pytest.mark.slow),
        pytest.param("FLOAT32", marks=pytest.mark.slow),
        pytest.param("FLOAT64", marks=pytest.mark.slow),
        pytest.param("FLOAT8_E4M3FN", marks=pytest.mark.slow),
    ],
)
def test_nothing_outside_is_touched(cuda_on_cpu, dtype):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(cuda_on_cpu), dtype],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    assert "blobs decoded" in done.stdout
