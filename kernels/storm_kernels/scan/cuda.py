"""Scans on a CUDA device by Triton kernels, launched on PyTorch's current stream.

A launch allocates nothing but the results its caller made and, where tiles look back, a scratch of
zeros; it never synchronises, so it can be captured in a CUDA graph. Triton compiles a kernel at
the first call with new types or options. Triton is loaded only when something here is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import torch

from ..errors import BackendUnavailable
from .launches import Columns, Rows, columns_for, cut, levels, rows_for
from .layout import Arrangement, Strides, arrange

__all__ = ["fold", "linear", "linear_gradient", "load_kernels", "probe"]

_NEUTRAL: Final = {"add": 0, "mul": 1, "max": float("-inf"), "min": float("inf")}
_NEUTRAL_INTEGER: Final = {"max": -(1 << 63), "min": (1 << 63) - 1}
_PIPELINE_STAGES: Final = 3

_TRITON_TYPES: Final = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
}


@lru_cache(maxsize=1)
def probe() -> tuple[bool, str]:
    """Return whether a device can be used, and its name or why not."""
    if not torch.cuda.is_available():
        return False, "no usable CUDA device: torch.cuda.is_available() is false"
    try:
        load_kernels()
    except BackendUnavailable as missing:
        return False, str(missing)
    major, minor = torch.cuda.get_device_capability()
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    return True, f"{count} x {name}, sm_{major}{minor}, Triton"


@lru_cache(maxsize=1)
def load_kernels() -> ModuleType:
    """Return the module of the kernels; raises BackendUnavailable without Triton."""
    try:
        from . import kernels
    except ImportError as missing:
        raise BackendUnavailable(f"Triton is missing ({missing}): pip install triton") from missing
    return kernels


def fold(
    x: torch.Tensor,
    y: torch.Tensor,
    dim: int,
    *,
    op: str,
    reverse: bool,
    exclusive: bool,
    compensated: bool,
    tile: Columns | Rows | None = None,
) -> None:
    """Write the scan of `x`, as y's type, with `op` along `dim` to `y`; as reference.fold.

    `tile` overrides what launches.py chooses.
    """
    kernels = load_kernels()
    space = arrange(y, dim)
    x, x_strides = space.place(x)
    y_strides = space.place(y)[1]
    accumulator = _accumulator(y.dtype)
    parts = 2 if compensated else 1
    words = parts * accumulator.itemsize // 4
    options = {
        "OP": "compensated" if compensated else op,
        "NEUTRAL": _neutral(op, accumulator),
        "CAST": _triton_type(y.dtype),
        "ACC": _triton_type(accumulator),
        "REVERSE": reverse,
        "EXCLUSIVE": exclusive,
        "MAPS": words,
    }
    tile = tile or _tile(space, max(x.itemsize, y.itemsize), words)
    launch = _Launch(space, tile, options)
    if isinstance(tile, Columns):
        launch.run(kernels.fold_columns, [x, y], [*x_strides, *y_strides])
    else:
        launch.run(kernels.fold_rows, [x, y], [*x_strides[:2], *y_strides[:2]])


def linear(
    a: torch.Tensor,
    b: torch.Tensor,
    initial: torch.Tensor | None,
    h: torch.Tensor,
    dim: int,
    *,
    reverse: bool,
    tile: Columns | Rows | None = None,
) -> None:
    """Write h_t = a_t h_(t-1) + b_t along `dim` to `h`; as reference.linear."""
    _linear([a, b, initial, h, None, None], dim, reverse=reverse, gradient=False, tile=tile)


def linear_gradient(
    g: torch.Tensor,
    a: torch.Tensor,
    h: torch.Tensor,
    initial: torch.Tensor | None,
    da: torch.Tensor,
    db: torch.Tensor,
    dim: int,
    *,
    reverse: bool,
    tile: Columns | Rows | None = None,
) -> None:
    """Write the gradients of `linear`'s a and b, given `g`; as reference.linear_gradient."""
    _linear([a, g, initial, h, db, da], dim, reverse=not reverse, gradient=True, tile=tile)


def _linear(
    tensors: list[torch.Tensor | None],
    dim: int,
    *,
    reverse: bool,
    gradient: bool,
    tile: Columns | Rows | None,
) -> None:
    a, b, initial, h, db, da = tensors
    assert a is not None
    assert b is not None
    assert h is not None
    kernels = load_kernels()
    space = arrange(da if da is not None else h, dim)
    is_complex = h.is_complex()
    accumulator = _accumulator(h.dtype)
    words = accumulator.itemsize // 4 * (2 if is_complex else 1)
    arrays = [_placed(space, one if one is not None else h) for one in (a, b, h, db, da)]
    state = _placed_state(space, initial) if initial is not None else (arrays[2][0], (0, 0))
    options = {
        "OP": "complex_linear" if is_complex else "linear",
        "ACC": _triton_type(accumulator),
        "COMPLEX": is_complex,
        "INITIAL": initial is not None,
        "GRADIENT": gradient,
        "REVERSE": reverse,
        "MAPS": 2 * words,
    }
    tile = tile or _tile(
        space, accumulator.itemsize if is_complex else h.itemsize, 2 * words, gradient=gradient
    )
    pointers = [arrays[0][0], arrays[1][0], state[0], *(one for one, _ in arrays[2:])]
    kernel, used = kernels.linear_columns, 3
    if isinstance(tile, Rows):
        kernel, used = kernels.linear_rows, 2
    strides = [
        *(one for _, steps in arrays[:2] for one in steps[:used]),
        *state[1][: used - 1],
        *(one for _, steps in arrays[2:] for one in steps[:used]),
    ]
    _Launch(space, tile, options).run(kernel, pointers, strides)


class _Launch:
    """One kernel over all tiles of all sequences."""

    def __init__(self, space: Arrangement, tile: Columns | Rows, options: dict[str, Any]) -> None:
        self._space, self._tile = space, tile
        self._channels = tile.channels if isinstance(tile, Columns) else 1
        self._chunks = cut(space.inner, self._channels)
        self._chains = space.outer * self._chunks
        self._tiles = cut(space.length, tile.length)
        self._options = options

    def run(self, kernel: Any, tensors: list[torch.Tensor], strides: list[int]) -> None:
        """Launch `kernel` on the memory of `tensors`."""
        tile, device = self._tile, tensors[0].device
        look_back = tile.look_back and self._tiles > 1
        programs = self._chains * (self._tiles if look_back else 1)
        sizes = [self._space.length]
        depth = levels(self._tiles, tile.fan) if look_back else 0
        shape = {"N": self._channels, "FAN": tile.fan, "LEVELS": depth, "LOOK_BACK": look_back}
        if isinstance(tile, Columns):
            sizes += [self._space.inner, self._chunks]
            shape |= {"R": tile.rows, "G": tile.stretches}
        else:
            shape["N"] = tile.elements
        scratch = self._scratch(device) if look_back else _as_pointer(tensors[0])
        with _current(device):
            kernel[(programs,)](
                *(_as_pointer(one) for one in tensors),
                scratch,
                *sizes,
                self._chains,
                self._tiles,
                *strides,
                **self._options,
                **shape,
                STAGES=1 if look_back else _PIPELINE_STAGES,
                num_warps=tile.warps,
            )

    def _scratch(self, device: torch.device) -> torch.Tensor:
        """Return the ticket counter and room for what tiles publish, all zero."""
        words = 2 + self._chains * self._tiles * self._channels * self._options["MAPS"]
        return torch.zeros(words, dtype=torch.int64, device=device)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Return what makes `device` the one that Triton launches on; mostly it is already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _tile(
    space: Arrangement, itemsize: int, words: int, *, gradient: bool = False
) -> Columns | Rows:
    if space.inner == 1:
        return rows_for(space.outer, space.length, words=words, gradient=gradient)
    return columns_for(
        space.outer, space.length, space.inner, itemsize, words=words, gradient=gradient
    )


def _placed(space: Arrangement, tensor: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """Return a tensor as the kernels see it: complex numbers are pairs, strides count halves."""
    placed, strides = space.place(tensor.resolve_conj())
    if placed.is_complex():
        return placed, (2 * strides[0], 2 * strides[1], 2 * strides[2])
    return placed, strides


def _placed_state(space: Arrangement, state: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    placed, strides = space.place_state(state.resolve_conj())
    if placed.is_complex():
        return placed, (2 * strides[0], 2 * strides[1])
    return placed, strides


def _as_pointer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.float64:
        return torch.float64
    if dtype.is_floating_point or dtype.is_complex:
        return torch.float32
    return torch.int64


def _neutral(op: str, accumulator: torch.dtype) -> float:
    if accumulator == torch.int64 and op in _NEUTRAL_INTEGER:
        return _NEUTRAL_INTEGER[op]
    return _NEUTRAL[op] if op in _NEUTRAL else float("-inf")


@lru_cache(maxsize=32)
def _triton_type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, _TRITON_TYPES[dtype])
