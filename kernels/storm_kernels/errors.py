"""What can go wrong in storm_kernels, by whose fault it is.

`UsageError` and `BackendUnavailable` are the caller's to fix, `CorruptBlob` is about bytes that
came from elsewhere. No function returns wrong data instead of raising one of these.
"""

from __future__ import annotations

__all__ = ["BackendUnavailable", "CorruptBlob", "CudaDriverError", "KernelsError", "UsageError"]


class KernelsError(Exception):
    """Anything raised by storm_kernels on purpose."""


class UsageError(KernelsError, ValueError):
    """An argument that no backend could accept: fix the call."""


class BackendUnavailable(KernelsError, RuntimeError):
    """The backend asked for is missing on this machine; the message says why."""


class CorruptBlob(KernelsError, ValueError):
    """Encoded bytes that are damaged, truncated or not ANCF at all.

    The output given to the decoder may hold anything; nothing outside it was touched.
    """


class CudaDriverError(KernelsError, RuntimeError):
    """A CUDA driver call failed. Nothing that the call was to create exists.

    Attributes:
        call: the driver's name of the call, such as "cuMemAlloc".
        code: the driver's name of the outcome, such as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, call: str, code: str, detail: str) -> None:
        super().__init__(f"{call} failed with {code}{': ' + detail if detail else ''}")
        self.call = call
        self.code = code
