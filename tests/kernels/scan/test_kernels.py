"""kernels.py, combine.py and look_back.py without a GPU: interpreted, tile by tile in order."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("which", "least"), [([], 50), pytest.param(["--all"], 400, marks=pytest.mark.slow)]
)
def test_interpreted_kernels_give_the_references_results(which, least):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *which],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    *wrong, last = done.stdout.splitlines()
    assert not wrong
    assert int(last.removeprefix("right: ")) > least
