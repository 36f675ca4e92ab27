"""The figures of a captured tensor: what the codec reaches, beside the bound."""

from __future__ import annotations

import torch
from storm_bench.activations.figures import tensor_figures
from storm_kernels import ancf


def test_figures_of_a_tensor():
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    figures = tensor_figures(tensor, analyze=True)
    assert figures.analysis == str(ancf.analyze(tensor, "dense"))
    assert tensor_figures(tensor, analyze=False).analysis is None
    assert figures.raw_nbytes == 1 << 18
    assert figures.bound_nbytes < figures.dense_nbytes < figures.fast_nbytes < figures.raw_nbytes
