"""Where a benchmark of training steps runs, and what has to be there beforehand."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from storm_bench.child_daemon import tail
from stormd.doctor.cuda import check_mps
from stormd.errors import ChildFailed

__all__ = ["MPS", "compile_codec", "device_here", "mps_is_on"]

MPS: Final = {True: ", MPS on", False: ", MPS off", None: ""}
"""How that is shown behind a device's name."""


def device_here() -> str:
    """Return "cuda" where PyTorch finds a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def mps_is_on(device: str) -> bool | None:
    """Return whether CUDA's MPS is on; None where there is no GPU to share."""
    return check_mps().state == "ok" if device == "cuda" else None


def compile_codec() -> None:
    """Put the codec's kernels where the daemon finds them: until it has them it stores raw.

    Raises:
        ChildFailed: they cannot be compiled; the compiler's words are in the text.
    """
    command = [sys.executable, "-m", "storm_kernels.ancf.compile", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode:
        raise ChildFailed(f"the codec's kernels cannot be compiled: {tail(done.stderr)}")
