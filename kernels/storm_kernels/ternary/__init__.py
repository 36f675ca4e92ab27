"""Ternary tensors that compute: values of -1, 0 and 1 on two bit planes.

`encode` and `decode` make planes and read them; `dot`, `matvec` and `matmul` compute on them;
`TernaryTensor` keeps planes with a shape and scales. All take NumPy arrays and torch tensors, on
the CPU and on CUDA. `storm_kernels.ternary.nn`, which needs torch, has the layers. DESIGN.md says
what a plane's bits mean, in which order floats are added, and what was measured.
"""

from __future__ import annotations

from ..errors import BackendUnavailable, CorruptBlob, UsageError
from .api import decode, dot, encode, matmul, matvec, pack, unpack
from .tensor import TernaryTensor

__all__ = [
    "BackendUnavailable",
    "CorruptBlob",
    "TernaryTensor",
    "UsageError",
    "decode",
    "dot",
    "encode",
    "matmul",
    "matvec",
    "pack",
    "unpack",
]
