"""STORM's GEMM: matrix products that encode their results in the same pass.

`linear` and `gated_mlp` return a result and ANCF blobs of products; `grad_weight` takes a blob.
`storm_kernels.nn.GatedMLP` is the layer for training. The kernels add in their own order, so
results are close to cuBLAS's but not equal. So nothing here is used unless a caller requests it.
DESIGN.md says how the kernels write blobs, and what limits their speed.
"""

from __future__ import annotations

from .api import backends, gated_mlp, grad_weight, is_available, linear
from .encoded import Encoded

__all__ = ["Encoded", "backends", "gated_mlp", "grad_weight", "is_available", "linear"]
