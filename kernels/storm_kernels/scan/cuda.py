"""Scans on a CUDA device by Triton kernels, launched on PyTorch's current stream.

The caller allocates the results. Tiles that look back need a scratch buffer, which is kept for each
stream. A launch never synchronises, so a CUDA graph can capture it; the graph gets its own scratch
and zeroes it in each replay. Triton compiles a kernel at the first call with new types or options.
Triton is loaded only when a function here is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import torch

from ..errors import BackendUnavailable
from .launches import Columns, Rows, columns_for, cut, levels, rows_for, vector_for
from .layout import Arrangement, Strides, arrange

__all__ = ["fold", "linear", "linear_gradient", "load_kernels", "probe"]

_NEUTRAL: Final = {"add": 0, "mul": 1, "max": float("-inf"), "min": float("inf")}
_NEUTRAL_INTEGER: Final = {"max": -(1 << 63), "min": (1 << 63) - 1}
_PIPELINE_STAGES: Final = 3
_ALIGNMENT: Final = 16
"""The alignment of addresses, in bytes, for which Triton compiles a different kernel."""

_MAX_KNOWN: Final = 1024
_KEPT_WORDS: Final = 1 << 20
"""The maximum scratch kept for a stream; a launch that needs more gets a new zeroed buffer."""

_MAX_LAUNCHES: Final = 1 << 31
"""The maximum number of launches per scratch: their numbers must not repeat."""

_NO_STREAM: Final = (1, 2)
"""Stream handles that mean a different stream in each thread or on each device."""

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
    """Return whether a device can be used, and its name or the reason why not."""
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
    """Convert `x` to y's type and write its scan to `y`, as reference.fold does.

    `tile` overrides the choice of launches.py.
    """
    form = (_form(x), _form(y), y.device, dim, op, reverse, exclusive, compensated, tile)
    known = _known.get(form)
    if known is not None:
        known.launch(x, y)
        return
    kernels = load_kernels()
    space = arrange(y, dim)
    source, x_strides = space.place(x)
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
    kernel, strides = kernels.fold_columns, [*x_strides, *y_strides]
    if isinstance(tile, Rows):
        kernel, strides = kernels.fold_rows, [*x_strides[:2], *y_strides[:2]]
        options["V"] = vector_for(tile, x.itemsize, y.itemsize) if reverse else tile.elements
    made = _Launch(kernel, space, tile, strides, options, y.device)
    made.launch(source, y)
    if source is x:
        _remember(form, made)


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
    """Write h_t = a_t h_(t-1) + b_t along `dim` to `h`, as reference.linear does."""
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
    """Write the gradients of `linear`'s a and b, given `g`, as reference.linear_gradient does."""
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
    forms = [None if one is None else _form(one) for one in tensors]
    form = (*forms, h.device, dim, reverse, gradient, tile)
    known = _known.get(form)
    if known is not None:
        known.launch(*[h if one is None else one for one in tensors])
        return
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
    kernel, used = kernels.linear_columns, 3
    if isinstance(tile, Rows):
        kernel, used = kernels.linear_rows, 2
        options["V"] = 1 if is_complex else vector_for(tile, h.itemsize)  # real parts: stride 2
    strides = [
        *(one for _, steps in arrays[:2] for one in steps[:used]),
        *state[1][: used - 1],
        *(one for _, steps in arrays[2:] for one in steps[:used]),
    ]
    placed = [arrays[0][0], arrays[1][0], state[0], *(one for one, _ in arrays[2:])]
    made = _Launch(kernel, space, tile, strides, options, h.device)
    made.launch(*placed)
    pairs = zip(tensors, placed, strict=True)
    if all(one is None or one.data_ptr() == other.data_ptr() for one, other in pairs):
        _remember(form, made)  # nothing was copied


class _Launch:
    """A kernel launch over all tiles of all sequences, for tensors of one form."""

    def __init__(
        self,
        kernel: Any,
        space: Arrangement,
        tile: Columns | Rows,
        strides: list[int],
        options: dict[str, Any],
        device: torch.device,
    ) -> None:
        channels = tile.channels if isinstance(tile, Columns) else 1
        chunks = cut(space.inner, channels)
        chains, tiles = space.outer * chunks, cut(space.length, tile.length)
        look_back = tile.look_back and tiles > 1
        depth = levels(tiles, tile.fan) if look_back else 0
        sizes = [space.length]
        constants = options | {"FAN": tile.fan, "LEVELS": depth, "LOOK_BACK": look_back}
        if isinstance(tile, Columns):
            sizes += [space.inner, chunks]
            constants |= {"N": channels, "R": tile.rows, "G": tile.stretches}
        else:
            constants["N"] = tile.elements
        constants["STAGES"] = 1 if look_back else _PIPELINE_STAGES
        self._limits = {"num_warps": tile.warps}
        self._kernel, self._device = kernel, device
        self._grid = (chains * (tiles if look_back else 1), 1, 1)
        self._words = 2 + chains * tiles * channels * options["MAPS"] if look_back else 0
        self._numbers = (*sizes, chains, tiles, *strides)
        self._constants = constants
        self._compiled: Callable[..., object] | None = None

    def launch(self, *tensors: torch.Tensor) -> None:
        """Launch on the memory of `tensors`, and on a scratch buffer if tiles look back."""
        if self._device.type != "cuda" or self._device.index == torch.cuda.current_device():
            self._launch(tensors)
            return
        with torch.cuda.device(self._device):  # Triton launches on the current device
            self._launch(tensors)

    def _launch(self, tensors: tuple[torch.Tensor, ...]) -> None:
        scratch = tensors[0]
        if self._words:
            scratch = _scratch(self._words, self._device)
        if self._compiled is not None:
            self._compiled(*tensors, scratch, *self._numbers)
            return
        compiled = self._kernel[self._grid](
            *map(_as_pointer, (*tensors, scratch)),
            *self._numbers,
            **self._constants,
            **self._limits,
        )
        if self._device.type == "cuda":
            names = self._kernel.arg_names
            self._numbers += tuple(self._constants[one] for one in names if one in self._constants)
            self._compiled = compiled[self._grid]


class _Scratch:
    """The scratch words of one stream, whose launches run in order, each with a unique number."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.words = torch.zeros(words, dtype=torch.int64, device=device)
        self.launches = 0


_scratches: Final[dict[tuple[int, int], _Scratch]] = {}
"""Scratch buffers by device and stream."""


def _scratch(words: int, device: torch.device) -> torch.Tensor:
    """Return a buffer of at least `words` words: zeros, or words of this stream's old launches."""
    if device.type != "cuda" or words > _KEPT_WORDS or torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int64, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream in _NO_STREAM:
        return torch.zeros(words, dtype=torch.int64, device=device)
    key = device.index, stream
    kept = _scratches.get(key)
    if kept is None or kept.words.numel() < words or kept.launches >= _MAX_LAUNCHES:
        kept = _scratches[key] = _Scratch(min(_KEPT_WORDS, 2 * words), device)
    kept.launches += 1
    return kept.words


_known: Final[dict[object, _Launch]] = {}
"""Launches by the form of a call's arguments, so that a repeated call reuses its launch."""


def _remember(form: object, launch: _Launch) -> None:
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _known[form] = launch


def _form(tensor: torch.Tensor) -> object:
    """Return the properties of a tensor that a launch depends on, including Triton's alignment."""
    aligned = tensor.data_ptr() % _ALIGNMENT == 0
    return tensor.shape, tensor.stride(), tensor.dtype, aligned, tensor.is_conj()


def _tile(
    space: Arrangement, itemsize: int, words: int, *, gradient: bool = False
) -> Columns | Rows:
    if space.inner == 1:
        return rows_for(space.outer, space.length, words=words, gradient=gradient)
    return columns_for(space.outer, space.length, space.inner, itemsize, words=words)


def _placed(space: Arrangement, tensor: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """Return a tensor with strides for the kernels; for complex types they count real numbers."""
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
