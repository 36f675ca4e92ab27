"""compute-sanitizer finds nothing in the CUDA kernels: no step outside, no race, no lost barrier.

Slow, and on a GPU alone; skipped where the tool is missing or refuses the machine's driver.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from storm_kernels import backends

SCRIPT = Path(__file__).parent / "cuda_under_sanitizer.py"
FOUND_SOMETHING = 9
REFUSED = ("Device not supported", "Unable to find injection", "Failed to initialize")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not backends()["cuda"].available, reason=backends()["cuda"].detail),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer"),
]


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("memcheck", []), ("synccheck", ["--brief"]), ("racecheck", ["--brief"])],
)
def test_nothing_is_found(tool, arguments):
    done = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no",
         "--error-exitcode", str(FOUND_SOMETHING),
         sys.executable, str(SCRIPT), *arguments],
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    if done.returncode != FOUND_SOMETHING and any(reason in said for reason in REFUSED):
        pytest.skip(f"compute-sanitizer does not work here: {said.strip().splitlines()[-1]}")
    assert done.returncode == 0, said
    assert "calls checked" in said
