"""A loss and its gradient compared with PyTorch's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from storm_client.losses.log_probabilities import TILE_BYTES
from torch import Tensor


def same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors have the same bits, whichever NaN stands where one does."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    nan = one.isnan()
    signs = one.signbit() | nan
    return torch.equal(one.nan_to_num(0.0), other.nan_to_num(0.0)) and (
        torch.equal(nan, other.isnan()) and torch.equal(signs, other.signbit() | nan)
    )


def compare(
    logits: Tensor, target: Tensor, *, dtype: torch.dtype | None = None, **options: Any
) -> None:
    """Check loss and gradient against PyTorch's, bit for bit."""
    logits = logits.requires_grad_()
    upcast = logits if dtype is None else logits.to(dtype)
    expected = F.cross_entropy(upcast, target, **options)
    outer = torch.rand_like(expected)
    (gradient,) = torch.autograd.grad(expected, logits, outer)
    del upcast
    found = storm.cross_entropy(logits, target, dtype=dtype, **options)
    assert same(found, expected), (found, expected)
    (ours,) = torch.autograd.grad(found, logits, outer)
    assert same(ours, gradient)


def set_tiles(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Have tiles of so many bytes on every device."""
    for kind in TILE_BYTES:
        patch.setitem(TILE_BYTES, kind, nbytes)
