"""Which implementations of the kernels work on this machine, and which one a call gets.

Nothing here loads torch, CuPy or CUDA until a probe needs to. The environment variable
`STORM_KERNELS_BACKEND` is read in this module alone; it names what "auto" stands for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, TypeAlias

from .errors import BackendUnavailable, UsageError

__all__ = ["SETTING", "BackendInfo", "BackendName", "backends", "resolve"]

SETTING = "STORM_KERNELS_BACKEND"
BackendName: TypeAlias = Literal["cuda", "cpu", "numpy"]

_PROBES = {"cuda": "storm_kernels.ancf.cuda", "cpu": "storm_kernels.ancf.cpu"}
_ORDER: dict[str, tuple[BackendName, ...]] = {
    "cuda": ("cuda", "cpu", "numpy"),
    "cpu": ("cpu", "numpy"),
}


@dataclass(frozen=True)
class BackendInfo:
    """Whether a backend works here; `detail` is its variant, or why it is missing."""

    name: BackendName
    available: bool
    detail: str


def backends() -> dict[str, BackendInfo]:
    """Return all backends by name, the fastest first; probing never raises."""
    return {
        "cuda": _probe("cuda"),
        "cpu": _probe("cpu"),
        "numpy": BackendInfo("numpy", available=True, detail="reference"),
    }


def resolve(asked: str, device_type: str) -> BackendName:
    """Return the backend for data on a device of `device_type` ("cpu" or "cuda").

    "auto" is what STORM_KERNELS_BACKEND names or, where that is "auto" or unset, the fastest that
    works. Raises UsageError for an unknown name and BackendUnavailable for one that is missing.
    """
    if asked == "auto":
        asked = os.environ.get(SETTING, "auto")
    if asked == "auto":
        order = _ORDER.get(device_type, _ORDER["cpu"])
        return next(name for name in order if _info(name).available)
    info = _info(asked)
    if not info.available:
        raise BackendUnavailable(f"backend {asked!r} is missing here: {info.detail}")
    return info.name


def _info(name: str) -> BackendInfo:
    if name == "numpy":
        return BackendInfo("numpy", available=True, detail="reference")
    if name == "cuda":
        return _probe("cuda")
    if name == "cpu":
        return _probe("cpu")
    raise UsageError(f"backend {name!r} is unknown; choose 'auto', 'cuda', 'cpu' or 'numpy'")


def _probe(name: Literal["cuda", "cpu"]) -> BackendInfo:
    try:
        available, detail = import_module(_PROBES[name]).probe()
    except ImportError as missing:
        return BackendInfo(name, available=False, detail=str(missing))
    return BackendInfo(name, available=available, detail=detail)
