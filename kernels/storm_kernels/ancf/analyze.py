"""`analyze`: reports how well a tensor compresses, in each mode, and why one mode is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .api import encode
from .choose import Sample, take_sample
from .dtypes import DType, dtype_of
from .escapes import escape_rate
from .layout import Mode

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .blob import Blob

__all__ = ["Analysis", "Candidate", "analyze"]


@dataclass(frozen=True)
class Candidate:
    """The result of one mode; `reached` differs from `asked` if mode `asked` does not pay."""

    asked: str
    speed: str
    reached: str
    nbytes: int
    ratio: float


@dataclass(frozen=True)
class Analysis:
    """The result of `analyze`. Bits are per element, shares 0..1, ratios original / encoded.

    `bound` is the ratio of an ideal order-0 coder. It codes +0.0, -0.0, and sign and exponent
    together, and stores mantissas uncompressed. For integers and booleans it codes whole values.
    """

    dtype: str
    shape: tuple[int, ...]
    raw_nbytes: int
    bound: float
    bound_bits: float
    zeros: float
    chosen: str
    chosen_ratio: float
    escape_rate: float
    reason: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        """Return the result as a small table."""
        lines = [
            f"{self.dtype} {list(self.shape)}, {self.raw_nbytes} bytes, {self.zeros:.1%} zeros",
            f"order-0 bound {self.bound:.3f}x ({self.bound_bits:.2f} bits an element)",
            f"chosen: {self.chosen} {self.chosen_ratio:.3f}x, {self.escape_rate:.2%} escapes",
            f"because: {self.reason}",
        ]
        lines += [
            f"  {c.asked:<10} {c.speed:<6} {c.ratio:8.3f}x"
            + ("" if c.asked == c.reached else f"  (kept as {c.reached})")
            for c in self.candidates
        ]
        return "\n".join(lines)


def analyze(tensor: torch.Tensor, speed: str = "fast", backend: str = "auto") -> Analysis:
    """Encode `tensor` once in each mode and return the results.

    Raises what `encode` raises. This is for interactive use: it takes about as long as twenty
    encodes.
    """
    chosen = encode(tensor, speed=speed, backend=backend)  # raises if it cannot be encoded
    dtype = dtype_of(tensor.dtype)
    elements = _elements(tensor, dtype)
    bits = bound_bits(elements, dtype)
    return Analysis(
        dtype=dtype.torch_name,
        shape=tuple(tensor.shape),
        raw_nbytes=chosen.raw_nbytes,
        bound=dtype.width / bits if bits else float("inf"),
        bound_bits=bits,
        zeros=float((_magnitudes(elements, dtype) == 0).mean()) if elements.size else 0.0,
        chosen=chosen.mode,
        chosen_ratio=chosen.ratio,
        escape_rate=escape_rate(chosen.host_data()),
        reason=_reason(chosen, elements, dtype, dense=speed == "dense"),
        candidates=_candidates(tensor, backend),
    )


def bound_bits(elements: NDArray[np.unsignedinteger], dtype: DType) -> float:
    """Return the order-0 bound in bits per element; `elements` are unsigned bit patterns."""
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


def _magnitudes(elements: NDArray[np.unsignedinteger], dtype: DType) -> NDArray[np.unsignedinteger]:
    return Sample(elements, dtype).magnitudes if dtype.is_float else elements


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _elements(tensor: torch.Tensor, dtype: DType) -> NDArray[np.unsignedinteger]:
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    elements: NDArray[np.unsignedinteger] = (
        flat.view(torch.uint8).numpy().view(f"<u{dtype.element_bytes}")
    )
    return elements


def _candidates(tensor: torch.Tensor, backend: str) -> tuple[Candidate, ...]:
    found = []
    for mode in Mode:
        for speed in ("fast", "dense") if mode is Mode.WINDOW else ("fast",):
            blob = encode(tensor, mode.name.lower(), speed, backend=backend)
            found.append(Candidate(mode.name.lower(), speed, blob.mode, blob.nbytes, blob.ratio))
    return tuple(found)


def _reason(
    chosen: Blob, elements: NDArray[np.unsignedinteger], dtype: DType, *, dense: bool
) -> str:
    if not elements.size:
        return "there is nothing to encode"
    sample = Sample(take_sample(elements), dtype)
    mode = chosen.header.mode
    wanted = sample.best_mode(dense=dense)
    if mode is not wanted:
        return f"the sample suggested {wanted.name.lower()}, which the whole tensor does not suit"
    if mode in (Mode.CONSTANT, Mode.BOOLEAN):
        return "all elements are equal" if mode is Mode.CONSTANT else "elements are 0 or 1"
    if mode is Mode.TERNARY:
        return "the sample holds at most three distinct values"
    estimates = _estimates(sample, dense=dense)
    ranked = sorted(estimates.items(), key=lambda item: item[1])
    return "bits an element by the sample: " + ", ".join(f"{k} {v:.2f}" for k, v in ranked)


def _estimates(sample: Sample, *, dense: bool) -> dict[str, float]:
    bits = {"raw": sample.raw_bits, "sparse": sample.sparse_bits}
    if sample.dtype.is_float:
        bits["truncated" if sample.drop else "window"] = sample.window_bits(dense=dense)
    else:
        bits["integer"] = sample.integer_width * sample.count
    return {mode: value / sample.count for mode, value in bits.items()}
