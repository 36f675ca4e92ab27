"""torch layers with ternary weights: trained with latent weights, inference from two bit planes."""

from __future__ import annotations

from .convert import ConversionReport, LayerReport, convert
from .linear import TernaryLinear
from .rotor_net import SimpleRotorNet

__all__ = ["ConversionReport", "LayerReport", "SimpleRotorNet", "TernaryLinear", "convert"]
