"""Where training steps are measured: the device, what has to be there, and its peak of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from storm_bench.child_daemon import tail
from stormd.doctor.cuda import check_mps
from stormd.errors import ChildFailed

if TYPE_CHECKING:
    import torch

__all__ = ["MPS", "compile_codec", "device_here", "mps_is_on", "peak_bytes", "reset_peak"]

_KIB: Final = 1 << 10

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


def reset_peak(device: torch.device) -> None:
    """Let the peak begin anew, of what is allocated and of what is reserved."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew


def peak_bytes(device: torch.device) -> int:
    """Return PyTorch's most allocated bytes on a GPU; without one, the most resident memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError("/proc/self/status has no VmHWM: the benchmark needs Linux")
