"""The benchmark on real activations: what it captures, and that the codec is near the bound."""

from __future__ import annotations

import pytest
import torch
from storm_bench.activations import models
from storm_bench.activations.capture import captured
from storm_bench.activations.figures import tensor_figures
from storm_bench.activations.models import FAMILIES
from storm_kernels import ancf


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_storages_are_captured_once_and_whole(family, monkeypatch):
    monkeypatch.setattr(models, "_BATCH", 2)  # bfloat16 is slow on many CPUs
    tensors = captured(family, 2, 1 << 14)
    assert tensors
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.nbytes == tensor.untyped_storage().nbytes() for tensor in tensors)
    assert min(tensor.nbytes for tensor in tensors) >= 1 << 14


def test_figures_of_a_tensor():
    tensor = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    figures = tensor_figures(tensor, analyze=True)
    assert figures.analysis == str(ancf.analyze(tensor, "dense"))
    assert tensor_figures(tensor, analyze=False).analysis is None
    assert figures.raw_nbytes == 1 << 18
    assert figures.bound_nbytes < figures.dense_nbytes < figures.fast_nbytes < figures.raw_nbytes
