"""A process that is killed in a kernel under MPS breaks every context there: the daemon recovers.

Slow, and alone: it would break the contexts of other tests that use the same MPS.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from support import killed_in_kernel
from support.supervised import start_run

from stormd.supervise.mps import CONTROL

SECONDS = 120


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.skipif(shutil.which(CONTROL) is None, reason="no MPS here")
def test_new_processes_can_use_the_gpu_after_one_was_killed_in_a_kernel(tmp_path: Path) -> None:
    """Where there are several GPUs, they are served again, too."""
    own_mps = {"STORMD_DEVICE": "auto", "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    script = [sys.executable, killed_in_kernel.__file__, str(SECONDS)]
    run = start_run(tmp_path, "--mps=on", "--pool-bytes=1GiB", "--", *script, variables=own_mps)
    status, out, err = run.end()
    assert status == 0, err
    served = ["served"] if torch.cuda.device_count() > 1 else []
    assert out.splitlines() == ["usable", "others", *served], err
