"""Loads CuPy, which compiles CUDA sources for the present device, and probes for a device.

CuPy compiles the kernels of ANCF and ternary at first use and keeps them in its cache on disk.
CuPy is loaded when a function here is called, not before.
"""

from __future__ import annotations

from typing import Any

from .errors import BackendUnavailable

__all__ = ["load_cupy", "probe"]


def load_cupy() -> Any:
    """Return CuPy; raise BackendUnavailable where it is missing."""
    try:
        import cupy
    except ImportError as missing:
        raise BackendUnavailable(
            f"CuPy is not installed ({missing}); pip install cupy-cuda13x"
        ) from missing
    return cupy


def probe() -> tuple[bool, str]:
    """Return whether a device can be used, and its name or the reason why not."""
    try:
        cupy = load_cupy()
        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        import storm_kernels.cuda_driver  # noqa: F401 (missing bindings are a reason too)
    except BackendUnavailable as missing:
        return False, str(missing)
    except Exception as error:  # noqa: BLE001 (CuPy's own error types need CuPy to name them)
        return False, f"no usable CUDA device: {error}"
    name = properties["name"].decode()
    return True, f"{count} x {name}, sm_{properties['major']}{properties['minor']}"
