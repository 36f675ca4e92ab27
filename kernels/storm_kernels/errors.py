"""What can go wrong in storm_kernels, by whose fault it is.

`UsageError` and `BackendUnavailable` are the caller's to fix, `CorruptBlob` is about bytes that
came from elsewhere. No function returns wrong data instead of raising one of these.
"""

from __future__ import annotations

__all__ = ["BackendUnavailable", "CorruptBlob", "KernelsError", "UsageError"]


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
