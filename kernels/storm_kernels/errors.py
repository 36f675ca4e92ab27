"""The exceptions of storm_kernels.

The caller can fix the cause of a `UsageError` or `BackendUnavailable`. `CorruptBlob` is about
bytes that came from elsewhere. No function returns wrong data instead of raising one of these.
"""

from __future__ import annotations

__all__ = ["BackendUnavailable", "CorruptBlob", "CudaDriverError", "KernelsError", "UsageError"]


class KernelsError(Exception):
    """The base class of all exceptions that storm_kernels defines."""


class UsageError(KernelsError, ValueError):
    """An argument that no backend could accept: fix the call."""


class BackendUnavailable(KernelsError, RuntimeError):
    """The requested backend is missing on this machine; the message says why."""


class CorruptBlob(KernelsError, ValueError):
    """Encoded bytes that are damaged, truncated or not ANCF at all.

    The decoder's output buffer may hold arbitrary bytes; nothing outside it was written.
    """


class CudaDriverError(KernelsError, RuntimeError):
    """A CUDA driver call failed, and created nothing.

    Attributes:
        call: the name of the driver call, such as "cuMemAlloc".
        code: the driver's name of the error, such as "CUDA_ERROR_OUT_OF_MEMORY".
    """

    def __init__(self, call: str, code: str, detail: str) -> None:
        super().__init__(f"{call} failed with {code}{': ' + detail if detail else ''}")
        self.call = call
        self.code = code
