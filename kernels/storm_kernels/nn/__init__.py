"""Layers on top of the kernels.

`AdaptiveRankSemiseparable` is a state-space layer on the scans, `GatedMLP` Llama's MLP on the
products that encode what they make.
"""

from __future__ import annotations

from .gated_mlp import Difference, GatedMLP
from .semiseparable import AdaptiveRankSemiseparable, Diagnostics, State

__all__ = ["AdaptiveRankSemiseparable", "Diagnostics", "Difference", "GatedMLP", "State"]
