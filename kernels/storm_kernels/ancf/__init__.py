"""ANCF: lossless compression of activations, with the same bytes from every backend.

`encode` and `decode` work on tensors. For other data, `host_backend(name).encode_into` and
`.decode_into` work on addresses, together with `max_encoded_bytes` and `read_header`. FORMAT.md
specifies every byte of a blob.
"""

from __future__ import annotations

from ..errors import BackendUnavailable, CorruptBlob, UsageError
from .api import HostBackend, decode, encode, host_backend
from .blob import Blob
from .dtypes import DType, dtype_of
from .header import Header, read_header
from .layout import Mode
from .plan import max_encoded_bytes

__all__ = [
    "BackendUnavailable",
    "Blob",
    "CorruptBlob",
    "DType",
    "Header",
    "HostBackend",
    "Mode",
    "UsageError",
    "decode",
    "dtype_of",
    "encode",
    "host_backend",
    "max_encoded_bytes",
    "read_header",
]
