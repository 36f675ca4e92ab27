"""Layers on top of the kernels.

`AdaptiveRankSemiseparable` is a state-space layer that uses the scans. `GatedMLP` is Llama's MLP;
it uses the matrix products that encode their results.
"""

from __future__ import annotations

from .gated_mlp import Difference, GatedMLP
from .semiseparable import AdaptiveRankSemiseparable, Diagnostics, State

__all__ = ["AdaptiveRankSemiseparable", "Diagnostics", "Difference", "GatedMLP", "State"]
