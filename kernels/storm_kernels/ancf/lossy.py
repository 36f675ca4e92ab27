"""The only lossy step of the project: rounding elements to a few centres, only on request.

`quantize` replaces an element by a centre only if that changes it by no more than `tolerance`.
Every other element, including NaNs and infinities, keeps its bits. Mode values then encodes the
result losslessly, so the tolerance holds for the tensor that `decode` returns.

Centres come from 1-D K-means (Lloyd's algorithm) over a sorted sample. Sums are integers, so the
CPU and every GPU find the same centres.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from . import layout
from .options import check_tolerance

if TYPE_CHECKING:
    import torch

__all__ = ["quantize"]

_ITERATIONS = 16
_GRID = 1 << 40  # steps of the fixed-point grid on which centres are averaged
_PIECE = 1 << 22  # elements rounded at a time, in float64
_PART = 0.7071  # share of a complex number's tolerance for each part: less than the root of 1/2


def quantize(tensor: torch.Tensor, mode: str, tolerance: float, centres: int) -> torch.Tensor:
    """Return `tensor` with elements moved to one of at most `centres` values.

    No element moves by more than `tolerance` (in the tensor's own unit; complex numbers in the
    plane). Raises UsageError for a tolerance that is negative or not finite, a mode other than
    "auto" and "values", and for tensors that are not floating point.
    """
    import torch

    _check(tensor, mode, tolerance)
    real, distance = tensor, tolerance
    if tensor.is_complex():
        real, distance = torch.view_as_real(tensor), tolerance * _PART
    flat = real.reshape(-1)
    values = _centres(_sample(flat), centres, real.dtype)
    if not values.numel():
        return tensor
    result = torch.empty_like(flat)
    for start in range(0, flat.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        result[piece] = _round(flat[piece], values, distance)
    result = result.view(real.shape)
    return torch.view_as_complex(result) if tensor.is_complex() else result


def _check(tensor: torch.Tensor, mode: str, tolerance: float) -> None:
    check_tolerance(tolerance)
    if mode not in ("auto", "values"):
        raise UsageError(f"tolerance {tolerance} needs mode 'values' or 'auto', not {mode!r}")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UsageError(f"tolerance {tolerance} needs floating-point elements, not {tensor.dtype}")


def _sample(flat: torch.Tensor) -> torch.Tensor:
    """Return the finite elements of a regular sample, sorted, as float64."""
    import torch

    stride = max(1, flat.numel() // layout.SAMPLE_MAX)
    taken = flat[::stride][: layout.SAMPLE_MAX].to(torch.float64)
    return taken[torch.isfinite(taken)].sort().values


def _centres(sample: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the centres of `sample` (sorted), ascending, exactly representable in `dtype`."""
    import torch

    if not sample.numel():
        return sample
    scale = float(sample.abs().max()) or 1.0
    points = (sample / scale * _GRID).round().to(torch.int64)
    sums = torch.cat([points.new_zeros(1), points.cumsum(0)])
    places = torch.linspace(0, sample.numel() - 1, count, dtype=torch.float64).round().long()
    centres = _distinct(points[places.to(points.device)])
    for _ in range(_ITERATIONS):
        centres = _lloyd(points, sums, centres)
    values = (centres.to(torch.float64) / _GRID * scale).to(dtype).to(torch.float64)
    return _distinct(torch.cat([values, values.new_zeros(1)]).sort().values)


def _distinct(ascending: torch.Tensor) -> torch.Tensor:
    """Return `ascending` without repetitions."""
    import torch

    first = torch.ones_like(ascending, dtype=torch.bool)
    first[1:] = ascending[1:] != ascending[:-1]
    return ascending[first]


def _lloyd(points: torch.Tensor, sums: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """Return the mean of the points nearest to each centre; drop centres without points."""
    import torch

    middles = (centres[1:] + centres[:-1]) // 2
    inner = torch.searchsorted(points, middles, right=True)
    ends = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), points.numel())])
    sizes = ends.diff()
    used = sizes > 0
    return _distinct((sums[ends[1:]] - sums[ends[:-1]])[used] // sizes[used])


def _round(piece: torch.Tensor, values: torch.Tensor, tolerance: float) -> torch.Tensor:
    import torch

    wide = piece.to(torch.float64)
    nearest = values[torch.bucketize(wide, (values[1:] + values[:-1]) / 2)]
    # Strictly less, so that rounding of the difference to float64 cannot hide a larger one.
    close = (wide - nearest).abs() < tolerance
    return torch.where(close, nearest.to(piece.dtype), piece)
