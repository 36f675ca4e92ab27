"""Names of element types: PyTorch's for statistics, and the codec's for messages.

Every type has both names. The codec gets types that it does not know as plain bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from storm_kernels.ancf import DType

__all__ = ["ENCODED", "codec_name", "dtype_name"]

ENCODED: Final = "encoded"
"""The codec of data that was encoded before it was saved: the daemon stores it raw."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@cache
def codec_name(dtype: torch.dtype) -> str:
    """Return the codec's name for elements of `dtype`: "bytes" if the codec has no other."""
    name = dtype_name(dtype)
    return name if name.upper() in DType.__members__ else "bytes"
