"""Cross-entropy in tiles of rows: the same bits as PyTorch's own, in less memory.

A loss of language models is computed in float32. PyTorch keeps three float32 tensors of the logits'
size for it: the copy or its gradient, the log-probabilities, and their gradient. Here,
log-probabilities exist for one tile of rows at a time. The forward pass selects those of the
targets and passes them to PyTorch's `nll_loss`, which adds them in the same order. The backward
pass recomputes the tiles. Each operation is PyTorch's and treats each row separately, so tiles
change no bit.

Needs no client, daemon or offload.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from numbers import Integral
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn._reduction import legacy_get_string
from torch.utils._python_dispatch import TorchDispatchMode

from storm_client.eager.function_modes import Watching
from storm_client.errors import UsageError
from storm_client.hook_stack import function_modes
from storm_client.losses.deferred import Deferred, is_traced
from storm_client.losses.log_probabilities import TILE_BYTES, log_probabilities, rows_that_fill
from storm_client.losses.targets import IGNORED, Targets

__all__ = [
    "FLOATING",
    "REDUCTIONS",
    "Options",
    "check_targets",
    "cross_entropy",
    "in_tiles",
    "is_index",
    "is_plain",
    "loss_of",
    "of_pytorch",
]

FLOATING: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS: Final = ("mean", "sum", "none")
_PLAIN: Final = (Tensor, torch.nn.Parameter, Deferred)
_READ_IN_PLACE: Final = (2, 4)
"""Dimensions of logits for which PyTorch's backward pass reads the targets wherever they are."""

_hooks_are_enabled: Any = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def cross_entropy(  # noqa: PLR0917 - PyTorch's order
    input: Tensor,  # noqa: A002 - PyTorch's name
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of the arguments, bit for bit, in less memory.

    With `dtype` the result is that for `input.to(dtype)`, the upcast of half-precision logits that
    models write; this copy is never made as a whole. Besides the logits, the forward pass takes two
    tiles and a few numbers a row, and the backward pass up to four tiles and the gradient. A tile
    takes 32 MiB on a GPU and 4 MiB on a CPU, or at least 8 rows; with label smoothing on a GPU, as
    many rows as fill it, some 500. On a GPU, bfloat16, float16 or float32 logits with more than
    2048 classes are computed by kernels without tiles. This requires CuPy, and that the kernels
    were seen to have PyTorch's bits: the first call for each number of classes compiles and
    compares them.

    The gradient overwrites the logits' memory if nothing else holds them (no variable, view or
    other operation, and the graph is not retained): drop the logits before `backward()`. If another
    stream still reads logits that nothing holds, wait for that stream first.

    PyTorch's own function computes calls that gain nothing or have no tiles: less than a tile, one
    row without a batch, class probabilities, label smoothing with more than two dimensions, class
    weights, invalid arguments, tensor subclasses, forward-mode differentiation, `torch.func`,
    traced or compiled code and `compile_step`.

    Args:
        input: logits (N, C) or (N, C, d1, ...) in float16, bfloat16, float32 or float64, on a CPU
            or a GPU; contiguous or not. With more than two dimensions, a tile is one or more of N.
        target: class indices (N) or (N, d1, ...) in int64, or anything else that PyTorch accepts.
        weight: of each class (C), or None.
        size_average: deprecated by PyTorch, as there.
        ignore_index: a target with this value does not count.
        reduce: deprecated by PyTorch, as there.
        reduction: "mean", "sum" or "none".
        label_smoothing: 0.0 to 1.0.
        dtype: type in which the loss is computed and returned; None for the logits' or autocast's.

    Returns:
        A scalar, or with "none" a loss for each target.

    Raises:
        UsageError: `dtype` is no floating-point type.
        IndexError: a target on a CPU is neither a class nor `ignore_index`; on a GPU, PyTorch's
            device-side assertion fails.
        RuntimeError: one backward pass goes through the loss and through its gradient.
        RuntimeError, TypeError, ValueError: raised by PyTorch's function.

    Example:
        logits = head(hidden).flatten(0, 1)          # (tokens, vocabulary), bfloat16
        loss = storm.cross_entropy(logits, target.flatten(), dtype=torch.float32)
        del logits                                    # the gradient reuses its memory
        loss.backward()
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"dtype is {dtype!r}; a loss needs a floating-point type, as torch.float32"
        )
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    options = Options(weight, ignore_index, reduction, label_smoothing)
    loss = in_tiles(input, target, options, dtype)
    return of_pytorch(input, target, options, dtype) if loss is None else loss


class Options(NamedTuple):
    """The options of a loss."""

    weight: Tensor | None
    """Of each class (C)."""
    ignore_index: int
    reduction: str
    label_smoothing: float


def in_tiles(
    logits: Tensor, target: Tensor, options: Options, dtype: torch.dtype | None
) -> Tensor | None:
    """Return the loss, computed in tiles; None if PyTorch's own function has to compute it."""
    if options.weight is not None or not is_plain(logits, target):
        return None
    if not _has_tiles(logits, target, options, dtype):
        return None
    classes, computed = logits.shape[1], _computed_in(logits, dtype)
    check_targets(target, classes, options.ignore_index)
    if logits.dim() not in _READ_IN_PLACE:
        target = target.contiguous()
    rows = Targets.of(target, classes, options.ignore_index)
    smoothing = options.label_smoothing > 0
    cast = logits.dtype if dtype is None else dtype
    picked, sums = log_probabilities(logits, rows, computed, cast=cast, smoothing=smoothing)
    return loss_of(picked, sums, rows, options, classes)


def of_pytorch(
    logits: Tensor,
    target: Tensor,
    options: Options,
    dtype: torch.dtype | None,
    function: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return what PyTorch's `function` computes, by default the present one."""
    return (function or F.cross_entropy)(
        logits.to(dtype) if dtype is not None and isinstance(logits, Tensor) else logits,
        target,
        options.weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether PyTorch's eager reverse mode is all that processes the tensors."""
    if torch.compiler.is_compiling() or _is_step_captured():
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    if forward_ad._current_level >= 0 or is_traced():
        return False
    return all(one is None or type(one) in _PLAIN for one in tensors)


def _is_step_captured() -> bool:
    """Return whether this thread captures a step, where tensors have no content."""
    modes = function_modes()
    return any(isinstance(mode, Watching) and mode.is_for_compiled_code for mode in modes)


def _has_tiles(logits: Tensor, target: Tensor, options: Options, dtype: torch.dtype | None) -> bool:
    """Return whether the arguments are valid for tiles, and take more than a tile."""
    if logits is None or target is None or not _are_valid(options):
        return False
    if logits.dim() < 2 or logits.dtype not in FLOATING or target.dtype != torch.int64:
        return False
    if target.shape != logits.shape[:1] + logits.shape[2:] or target.device != logits.device:
        return False
    if logits.device.type not in TILE_BYTES or logits.layout != torch.strided:
        return False
    computed = logits.dtype if dtype is None else dtype
    most = TILE_BYTES[logits.device.type]
    if computed not in FLOATING or logits.numel() * computed.itemsize <= most:
        return False
    return not options.label_smoothing or _has_smooth_tiles(logits, options.label_smoothing)


def _are_valid(options: Options) -> bool:
    """Return whether tiles take these options; PyTorch takes others, or raises its own error."""
    if not is_index(options.ignore_index) or options.reduction not in REDUCTIONS:
        return False
    return isinstance(options.label_smoothing, (int, float))


def is_index(value: object) -> bool:
    """Return whether a value is an integer that fits int64."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return -(1 << 63) <= int(value) < 1 << 63


def _has_smooth_tiles(logits: Tensor, smoothing: float) -> bool:
    """Return whether tiles have the same sums of rows as PyTorch computes for all rows at once.

    On a GPU, PyTorch halves tensors of more than 2 GiB; one half must fill the GPU, too.
    """
    if logits.dim() > 2 or not 0 < smoothing <= 1:
        return False
    row_bytes = logits.shape[1] * torch.float64.itemsize
    return not logits.is_cuda or rows_that_fill(logits.device) * row_bytes < 1 << 30


def _computed_in(logits: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type of log-probabilities, which autocast may change.

    On a CPU autocast casts the logits. On a GPU it casts log-probabilities, where they are added.
    """
    dtype, kind = logits.dtype if dtype is None else dtype, logits.device.type
    if torch.is_autocast_enabled(kind):
        return _computed_under_autocast(logits.device, dtype, torch.get_autocast_dtype(kind))
    return dtype


@lru_cache(maxsize=64)
def _computed_under_autocast(
    device: torch.device,
    dtype: torch.dtype,
    cast: torch.dtype,  # noqa: ARG001 - of which the cache keeps what was found
) -> torch.dtype:
    seen = _SeenLogSoftmax()  # type: ignore[no-untyped-call]
    # In inference mode, and below autograd, a mode is shown the whole loss as one operation.
    with torch.inference_mode(False), seen:
        one = torch.zeros((1, 1), dtype=dtype, device=device)
        F.cross_entropy(one, torch.zeros(1, dtype=torch.int64, device=device))
    assert seen.dtype is not None
    return seen.dtype


class _SeenLogSoftmax(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the type of the log-probabilities that PyTorch's function computes."""

    dtype: torch.dtype | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, below the level that autocast changes."""
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._log_softmax.default:
            self.dtype = made.dtype
        return made


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise IndexError for a target that is no class, if its content can be read without a wait.

    Otherwise `nll_loss` rejects the target.
    """
    if target.device.type != "cpu" or not is_plain(target):
        return
    wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if wrong.any():
        raise IndexError(f"Target {int(target[wrong][0])} is out of bounds.")


def loss_of(
    picked: Tensor,
    sums: Tensor | None,
    rows: Targets,
    options: Options,
    classes: int,
) -> Tensor:
    """Return the loss from the targets' log-probabilities (N, ...) and each row's sums (N).

    Does what PyTorch's function does after log_softmax, in the same order.
    """
    nll = _nll(picked, rows, options.weight, options.reduction)
    if sums is None:
        return nll
    smooth = (-sums).masked_fill(rows.ignored, 0.0)
    if options.reduction != "none":
        smooth = smooth.sum()
    if options.reduction == "mean":
        smooth = smooth / _counted(rows, options.weight)
    return (1 - options.label_smoothing) * nll + smooth * (options.label_smoothing / classes)


def _counted(rows: Targets, weight: Tensor | None) -> Tensor:
    """Return the divisor for the mean of smoothed losses."""
    if weight is None:
        return (~rows.ignored).sum()
    return weight.gather(0, rows.classes.masked_select(~rows.ignored)).sum()


def _nll(picked: Tensor, rows: Targets, weight: Tensor | None, reduction: str) -> Tensor:
    """Return the negative log-likelihood of the targets' log-probabilities (N, ...)."""
    if weight is None:
        return _nll_of_column(picked, rows, reduction)
    # That of an ignored target may be infinite, and its gradient is 0 all the same.
    weights = weight[rows.classes].masked_fill_(rows.ignored, 1)
    weighted = picked * weights
    if reduction != "mean":
        return _nll_of_column(weighted, rows, reduction)
    return _nll_of_column(weighted, rows, "sum") / _nll_of_column(-weights, rows, "sum")


def _nll_of_column(numbers: Tensor, rows: Targets, reduction: str) -> Tensor:
    with _column_made_again(rows):
        return F.nll_loss(
            numbers.unsqueeze(1), rows.column, ignore_index=IGNORED, reduction=reduction
        )


def _column_made_again(rows: Targets) -> AbstractContextManager[Any]:
    """Return a context in which autograd does not save the column, but makes it again.

    What else it saves there is floating. It may give the column another shape.
    """
    if not _hooks_are_enabled():
        return nullcontext()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved if saved.is_floating_point() else saved.shape

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else rows.source.now().column.reshape(packed)

    return saved_tensors_hooks(pack, unpack)
