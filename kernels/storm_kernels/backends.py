"""Finds the backends of an operation that work on this machine, and selects one for a call.

Nothing here loads torch, CuPy, Triton or CUDA until a probe needs it. Only this module reads the
environment variable `STORM_KERNELS_BACKEND`, which names the backend that "auto" stands for.
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

    A probe of a known operation never raises. An unknown operation raises UsageError.
    """
    return {name: probe(operation, name) for name in BACKENDS}


def setting() -> str:
    """Return what "auto" stands for: a backend's name, or "auto" if the variable is unset."""
    return os.environ.get(SETTING, "auto")


def resolve(asked: str, device_type: str, operation: str = "ancf") -> BackendName:
    """Return the backend for data on a device of `device_type` ("cpu" or "cuda").

    "auto" means the backend that STORM_KERNELS_BACKEND names. If the variable is "auto" or unset,
    "auto" means the fastest backend that works. If that is NumPy, a warning, once per reason, says
    why and what to do. Raises UsageError for an unknown name and BackendUnavailable for a backend
    that is missing.
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
    """Warn of the fallback to NumPy, once per process and reason."""
    warnings.warn(
        f"storm_kernels falls back to NumPy, which is many times slower than its C library: "
        f"{reason}; `stormd doctor` checks for it",
        RuntimeWarning,
        stacklevel=4,
    )
