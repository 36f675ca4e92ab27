"""The device on which training steps are measured: its prerequisites, and its peak of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from storm_bench.child_daemon import tail
from stormd.doctor.cuda import check_mps
from stormd.errors import ChildFailed, ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "FREES_AT_ONCE",
    "MPS",
    "compile_codec",
    "device_here",
    "mps_is_on",
    "peak_bytes",
    "reset_peak",
]

_KIB: Final = 1 << 10

FREES_AT_ONCE: Final = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"
}
"""Variables of a process whose resident memory on a CPU is measured, whatever its method.

Each large tensor has a mapping of its own, which `free` returns to the kernel at once, and huge
pages keep the cost of that small. Otherwise the heap keeps holes of freed tensors, differently in
every run, and the peak shows malloc's behaviour. On a GPU it changes little.
"""

MPS: Final = {True: ", MPS on", False: ", MPS off", None: ""}
"""How the state of MPS is shown after a device's name."""


def device_here(wanted: str = "auto") -> str:
    """Return the device that is wanted; for "auto" "cuda" if PyTorch finds a GPU, else "cpu".

    Raises:
        ConfigError: a GPU is wanted, and PyTorch finds none.
    """
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" != found:
        raise ConfigError("the device is cuda, and PyTorch finds no GPU here: write --device cpu")
    return found if wanted == "auto" else wanted


def mps_is_on(device: str) -> bool | None:
    """Return whether CUDA MPS is on; None if there is no GPU to share."""
    return check_mps().state == "ok" if device == "cuda" else None


def compile_codec() -> None:
    """Compile the codec's kernels for the daemon: until it has them it stores tensors raw.

    Raises:
        ChildFailed: they cannot be compiled; the text has the compiler's output.
    """
    command = [sys.executable, "-m", "storm_kernels.ancf.compile", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    if done.returncode:
        raise ChildFailed(f"the codec's kernels cannot be compiled: {tail(done.stderr)}")


def reset_peak(device: torch.device) -> None:
    """Reset the peaks: of allocated and reserved memory, or of a CPU's resident memory."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """Return the peak of PyTorch's allocated bytes on a GPU, or of resident bytes on a CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * _KIB
    raise RuntimeError("/proc/self/status has no VmHWM: the benchmark needs Linux")
