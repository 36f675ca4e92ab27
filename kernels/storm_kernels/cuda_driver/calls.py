"""The one way into the CUDA driver: a call that either succeeds or raises.

All calls come here, so that no outcome is passed over. The bindings release the interpreter lock
during each, so that one may block without stopping other threads.
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
    """Return what a driver call returns beside its status: nothing, one value, or a tuple.

    Raises:
        CudaDriverError: the status is not success; `about` ends the message.
    """
    status, *values = function(*arguments)
    if status:
        raise CudaDriverError(function.__name__, status.name, about)
    return values[0] if len(values) == 1 else tuple(values)


def check(function: Callable[..., Any], outcome: tuple[Any, ...]) -> None:
    """Raise CudaDriverError unless the call of `function` with this outcome succeeded.

    For calls that are made for every tensor, where `call` would take half as long again.
    """
    if outcome[0]:
        raise CudaDriverError(function.__name__, outcome[0].name, "")


def initialise() -> None:
    """Initialise the driver; harmless when it has been done.

    Raises:
        BackendUnavailable: there is no driver or no device.
    """
    try:
        call(driver.cuInit, 0)
    except (CudaDriverError, RuntimeError) as error:
        # The bindings raise a plain RuntimeError where libcuda cannot be loaded.
        raise BackendUnavailable(f"no CUDA driver or device: {error}") from error
