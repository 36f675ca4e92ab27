"""Reduces strided tensors to three dimensions: outer, the scanned dimension, and inner.

Every backend works only on (outer, length, inner). The result's strides assign the dimensions:
those with larger strides than the scanned dimension are outer, the others inner. A result is dense,
so each group of its dimensions collapses to one stride. A source whose strides do not collapse the
same way is copied; those of slices, transposed and broadcast tensors mostly do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TypeAlias

import torch

__all__ = ["Arrangement", "Strides", "arrange"]

Strides: TypeAlias = tuple[int, int, int]
"""The strides of outer, length and inner, in elements."""


@dataclass(frozen=True)
class Arrangement:
    """The three sizes, and the dimensions of outer and inner, the largest stride first."""

    outer: int
    length: int
    inner: int
    outer_dims: tuple[int, ...]
    inner_dims: tuple[int, ...]
    dim: int

    def place(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Strides]:
        """Return `tensor` (or a copy) and its three strides; `tensor` has the result's shape."""
        strides = self._strides(tensor)
        if strides is None:
            tensor = self.copy(tensor)
            strides = self._strides(tensor)
            assert strides is not None
        return tensor, strides

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense copy with the dimensions in the result's order."""
        order = (*self.outer_dims, self.dim, *self.inner_dims)
        dense = torch.empty(
            [tensor.shape[one] for one in order], dtype=tensor.dtype, device=tensor.device
        )
        return dense.permute([order.index(one) for one in range(tensor.dim())]).copy_(tensor)

    def place_state(self, state: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the states of all sequences (the shape without `dim`) and their two strides."""
        widened, (outer, _, inner) = self.place(state.unsqueeze(self.dim))
        return widened, (outer, inner)

    def _strides(self, tensor: torch.Tensor) -> Strides | None:
        shape, strides = tensor.shape, tensor.stride()
        outer = _collapsed(shape, strides, self.outer_dims)
        inner = _collapsed(shape, strides, self.inner_dims)
        if outer is None or inner is None:
            return None
        return outer if self.outer > 1 else 0, strides[self.dim], inner


def arrange(result: torch.Tensor, dim: int) -> Arrangement:
    """Return the arrangement of `result` along `dim` >= 0; it is dense with 1 dimension or more."""
    return _arranged(result.shape, result.stride(), dim)


@lru_cache(maxsize=1024)
def _arranged(shape: tuple[int, ...], strides: tuple[int, ...], dim: int) -> Arrangement:
    others = [one for one in range(len(shape)) if one != dim]
    order = sorted((one for one in others if shape[one] != 1), key=lambda one: -strides[one])
    outer_dims = tuple(one for one in order if strides[one] > strides[dim])
    inner_dims = tuple(one for one in order if strides[one] <= strides[dim])
    single = tuple(one for one in others if shape[one] == 1)
    return Arrangement(
        outer=prod(shape[one] for one in outer_dims),
        length=shape[dim],
        inner=prod(shape[one] for one in inner_dims),
        outer_dims=single + outer_dims,
        inner_dims=inner_dims,
        dim=dim,
    )


@lru_cache(maxsize=1024)
def _collapsed(
    shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...]
) -> int | None:
    """Return the single stride that steps through `dims` in order, None if there is none.

    For no dimensions, or single elements, return 1: the stride is not used.
    """
    walked = [one for one in dims if shape[one] != 1]
    for slow, fast in pairwise(walked):
        if strides[slow] != strides[fast] * shape[fast]:
            return None
    return strides[walked[-1]] if walked else 1
