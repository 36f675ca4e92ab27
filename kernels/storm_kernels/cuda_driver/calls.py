"""Calls the CUDA driver; a call either succeeds or raises.

All driver calls use this module, so that every status is checked. The bindings release the
interpreter lock during each call, so a call that blocks does not stop other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from storm_kernels.errors import BackendUnavailable, CudaDriverError

try:
    from cuda.bindings import driver
except ImportError as error:
    raise BackendUnavailable(
        f"the CUDA bindings cannot be imported ({error}): pip install "
        "cuda-bindings cupy-cuda13x nvidia-ml-py"
    ) from error

__all__ = ["call", "check", "driver", "initialise"]


def call(function: Callable[..., Any], *arguments: Any, about: str = "") -> Any:
    """Call the driver and return its values without the status: one value, or a tuple.

    Raises:
        CudaDriverError: the status is not success; `about` ends the message.
    """
    status, *values = function(*arguments)
    if status:
        raise CudaDriverError(function.__name__, status.name, about)
    return values[0] if len(values) == 1 else tuple(values)


def check(function: Callable[..., Any], outcome: tuple[Any, ...]) -> None:
    """Raise CudaDriverError unless `outcome`, the result of `function`, reports success.

    This is for calls that run for every tensor: `call` would take 1.5 times as long.
    """
    if outcome[0]:
        raise CudaDriverError(function.__name__, outcome[0].name, "")


def initialise() -> None:
    """Initialise the driver; repeated calls are harmless.

    Raises:
        BackendUnavailable: there is no driver or no device.
    """
    try:
        call(driver.cuInit, 0)
    except (CudaDriverError, RuntimeError) as error:
        # The bindings raise a plain RuntimeError where libcuda cannot be loaded.
        raise BackendUnavailable(f"no CUDA driver or device: {error}") from error
