"""The figures of `stormd bench codec`: the codec's ratios against the order-0 bound.

Each storage that autograd saves in a step is captured once and whole, however many views of it are
saved. Parameters are left out, as the client does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from storm_kernels import ancf
from storm_kernels.ancf.choose import Sample
from torch.autograd.graph import saved_tensors_hooks

from storm_bench.activations.models import FAMILIES, Family, train

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["TensorFigures", "bound_bits", "measure", "tensor_figures"]


@dataclass(frozen=True)
class TensorFigures:
    """One captured storage: its bytes raw, at the bound, and encoded fast and dense."""

    dtype: str
    mode: str
    raw_nbytes: int
    bound_nbytes: float
    fast_nbytes: int
    dense_nbytes: int


def measure(steps: int, min_bytes: int) -> list[dict[str, Any]]:
    """Return the figures of every family, each with those of its tensors, ready for JSON."""
    return [
        _summary(family.name, [tensor_figures(t) for t in captured(family, steps, min_bytes)])
        for family in FAMILIES
    ]


def captured(family: Family, steps: int, min_bytes: int) -> list[Tensor]:
    """Return the storages of `min_bytes` and more that step number `steps` of `family` saves.

    They are flat tensors of the dtype they were saved with, in the order of the forward pass.
    """
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= min_bytes:
            saved.setdefault(storage.data_ptr(), tensor.detach())
        return tensor

    model = train(family, steps, saved_tensors_hooks(pack, lambda tensor: tensor))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return [_whole(tensor) for key, tensor in saved.items() if key not in parameters]


def _whole(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def tensor_figures(tensor: Tensor) -> TensorFigures:
    """Return the figures of a flat, contiguous tensor in host memory."""
    dtype = ancf.dtype_of(tensor.dtype)
    elements = tensor.view(torch.uint8).numpy().view(f"<u{dtype.element_bytes}")
    fast, dense = ancf.encode(tensor), ancf.encode(tensor, speed="dense")
    return TensorFigures(
        dtype=dtype.torch_name,
        mode=dense.mode,
        raw_nbytes=tensor.nbytes,
        bound_nbytes=bound_bits(elements, dtype) * elements.size / 8,
        fast_nbytes=fast.nbytes,
        dense_nbytes=dense.nbytes,
    )


def bound_bits(elements: NDArray[np.unsignedinteger], dtype: ancf.DType) -> float:
    """Return the bits per element of an ideal order-0 coder; `elements` are bit patterns.

    It codes +0.0, -0.0, and sign and exponent together, and stores mantissas uncompressed. For
    integers and booleans it codes whole values.
    """
    if not elements.size:
        return 0.0
    if not dtype.is_float:
        return _entropy(np.unique(elements, return_counts=True)[1])
    negative = elements == 1 << (dtype.width - 1)
    others = elements[(elements != 0) & ~negative]
    kinds = np.array([others.size, negative.sum(), elements.size - others.size - negative.sum()])
    if not others.size:
        return _entropy(kinds)
    share = others.size / elements.size
    drop = Sample(others, dtype).drop  # low bits that none of all elements has set
    mantissa = dtype.mantissa_bits - drop
    symbols = np.bincount((others >> others.dtype.type(dtype.mantissa_bits)).astype(np.int64))
    return _entropy(kinds) + float(share) * (_entropy(symbols) + mantissa)


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _summary(name: str, tensors: list[TensorFigures]) -> dict[str, Any]:
    raw = sum(t.raw_nbytes for t in tensors)
    bound = sum(t.bound_nbytes for t in tensors)
    fast = sum(t.fast_nbytes for t in tensors)
    dense = sum(t.dense_nbytes for t in tensors)
    return {
        "family": name,
        "raw_nbytes": raw,
        "bound_ratio": raw / bound,
        "fast_ratio": raw / fast,
        "dense_ratio": raw / dense,
        "fast_of_bound": bound / fast,
        "dense_of_bound": bound / dense,
        "tensors": [asdict(t) for t in tensors],
    }
