"""Under MPS: tensors that are stored as they are, beside products that keep encoders out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stormd.supervise.mps import CONTROL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"no {CONTROL} here"),
    pytest.mark.timeout(300),
]

TRAINER = Path(__file__).parents[1] / "support" / "long_kernels.py"


@pytest.mark.parametrize(
    ("codec", "direct", "modes"),
    [
        ("raw", "16MiB", {"raw"}),
        ("ancf", "16MiB", {"raw", "window"}),  # raw while products keep encoders out, if they do
        ("ancf", "0", {"window"}),
    ],
)
def test_all_comes_back_with_its_bits(codec: str, direct: str, modes: set[str]) -> None:
    command = [sys.executable, "-m", "stormd", "run", "--mps=on", "--pool-bytes=8GiB", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(TRAINER), codec],
        stdout=subprocess.PIPE, text=True, check=True, timeout=240,
        env=os.environ | {"STORMD_DIRECT_BYTES_CUDA": direct},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found["same"])
    assert found["stored_by_mode"].keys() <= modes
