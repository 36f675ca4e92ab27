"""Names of element types: PyTorch's, as statistics show them, and the codec's, as messages do.

Every type has both; what the codec does not know, it is given as plain bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from storm_kernels.ancf import DType

__all__ = ["ENCODED", "codec_name", "dtype_name"]

ENCODED: Final = "encoded"
"""The codec of what was encoded before it was saved: the daemon stores it raw."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@cache
def codec_name(dtype: torch.dtype) -> str:
    """Return the codec's name for elements of `dtype`: "bytes" where it has no other."""
    name = dtype_name(dtype)
    return name if name.upper() in DType.__members__ else "bytes"
