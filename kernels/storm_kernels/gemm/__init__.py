"""Products that hand over what they make encoded, in the same pass: STORM's GEMM.

`linear` and `gated_mlp` return a product and its result as an ANCF blob, `grad_weight` takes one.
`storm_kernels.nn.GatedMLP` is the layer to train with. Sums are added in an order of the kernels'
own, so results are close to cuBLAS's and not equal: nothing here is used unless a caller asks.
DESIGN.md says how the kernels write blobs, and what bounds them.
"""

from __future__ import annotations

from .api import backends, gated_mlp, grad_weight, is_available, linear
from .encoded import Encoded

__all__ = ["Encoded", "backends", "gated_mlp", "grad_weight", "is_available", "linear"]
