"""Layers on top of the kernels: `AdaptiveRankSemiseparable`, a state-space layer on the scans."""

from __future__ import annotations

from .semiseparable import AdaptiveRankSemiseparable, Diagnostics, State

__all__ = ["AdaptiveRankSemiseparable", "Diagnostics", "State"]
