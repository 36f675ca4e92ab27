"""Which implementations of an operation work on this machine, and which one a call gets.

Nothing here loads torch, CuPy, Triton or CUDA until a probe needs to. The environment variable
`STORM_KERNELS_BACKEND` is read in this module alone; it names what "auto" stands for.
"""

from __future__ import annotations

import os
import warnings
from functools import cache

from .errors import BackendUnavailable
from .registry import BACKENDS, BackendInfo, BackendName, probe

__all__ = ["SETTING", "BackendInfo", "BackendName", "backends", "resolve", "setting"]

SETTING = "STORM_KERNELS_BACKEND"

_ORDER: dict[str, tuple[BackendName, ...]] = {"cuda": BACKENDS, "cpu": ("cpu", "numpy")}


def backends(operation: str = "ancf") -> dict[str, BackendInfo]:
    """Return all backends of an operation by name, the fastest first.

    Probing never raises; an unknown operation is a UsageError.
    """
    return {name: probe(operation, name) for name in BACKENDS}


def setting() -> str:
    """Return what "auto" stands for: a backend's name, or "auto" where nobody says."""
    return os.environ.get(SETTING, "auto")


def resolve(asked: str, device_type: str, operation: str = "ancf") -> BackendName:
    """Return the backend for data on a device of `device_type` ("cpu" or "cuda").

    "auto" is what STORM_KERNELS_BACKEND names or, where that is "auto" or unset, the fastest that
    works; where that is NumPy, one warning says why and what to do. Raises UsageError for an
    unknown name and BackendUnavailable for one that is missing.
    """
    if asked == "auto":
        asked = setting()
    if asked == "auto":
        order = _ORDER.get(device_type, _ORDER["cpu"])
        found = next(name for name in order if probe(operation, name).available)
        if found == "numpy":
            _warn_of_numpy(probe(operation, "cpu").detail)
        return found
    info = probe(operation, asked)
    if not info.available:
        raise BackendUnavailable(f"backend {asked!r} is missing here: {info.detail}")
    return info.name


@cache
def _warn_of_numpy(reason: str) -> None:
    """Warn once a process, and reason."""
    warnings.warn(
        f"storm_kernels falls back to NumPy, which is many times slower than its C library: "
        f"{reason}; `stormd doctor` checks for it",
        RuntimeWarning,
        stacklevel=4,
    )
