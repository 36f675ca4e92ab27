"""Log-probabilities of targets, and their gradient, for one tile of rows at a time.

Logits may be deferred (`deferred.py`): then they are read in half precision, and their gradient is
deferred, too, until it is cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from storm_kernels.loss import cuda
from torch import Tensor

from storm_client.losses.deferred import ADVICE, USE, Deferred, Root, Watch
from storm_client.losses.kernels import NO_KERNELS, Kernels, kernels_for, statistics_of
from storm_client.losses.once import differentiable_once, follower
from storm_client.losses.sole_holder import is_held_by_graph_alone, keeper_of
from storm_client.losses.targets import Targets

__all__ = ["TILE_BYTES", "log_probabilities", "rows_that_fill"]

TILE_BYTES: Final = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Bytes of one tile's log-probabilities, which fit a cache. Smaller logits are left to PyTorch."""

TILE_ROWS: Final = 8
"""Tiles begin at multiples of it. So on a GPU, rows are at the same place of a 16-byte vector as
without tiles; this place decides in which order PyTorch adds."""

_CONTIGUOUS: Final = torch.contiguous_format

_NOT_TWICE: Final = f"a second derivative by way of float() of logits is not supported; {ADVICE}"


_TOGETHER: Final = (
    "one backward pass through a loss in tiles and through its gradient is not supported: PyTorch "
    'adds them in another order; in a block pass loss="plain" to offload(), elsewhere call '
    "PyTorch's own cross_entropy"
)


def log_probabilities(
    logits: Tensor,
    rows: Targets,
    dtype: torch.dtype,
    *,
    cast: torch.dtype,
    smoothing: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the targets' log-probabilities (N, ...) and, with `smoothing`, rows' sums of all (N).

    Args:
        logits: (N, C, ...) of more than a tile.
        rows: what there is for each target (N, ...).
        dtype: type of the log-probabilities.
        cast: type to which logits are rounded before they are converted to `dtype`, and their
            gradient after it was computed in `dtype`.
        smoothing: whether to return sums.
    """
    half, deferred = None, None
    if isinstance(logits, Deferred):
        # The gradient of a deferred tensor is float32: other types would be rounded to that first.
        half = logits.half_precision() if dtype == cast == logits.dtype else None
        if half is None:
            logits = logits.materialize()
        else:  # an alias that nothing else holds, so that holders of the other can be counted
            half = half.detach()
            deferred = _DeferredInput(logits.root.watch, follower(logits, _NOT_TWICE))
    tiles = Tiles.of(logits if half is None else half, cast, dtype, smoothing)
    given = _Given(half, deferred, rows, tiles)
    apply: Any = _LogProbabilities.apply
    found: tuple[Tensor, Tensor | None] = apply(logits, given)
    return found


class Tiles(NamedTuple):
    """How logits are divided: rows per tile, types of their numbers, and whether to sum rows."""

    rows: int
    least: int
    """A last tile with fewer rows is merged into the one before."""
    cast: torch.dtype
    """Type to which a tile's logits, and their gradient, are rounded."""
    dtype: torch.dtype
    """Type of the log-probabilities. It differs from `cast` under autocast."""
    smoothing: bool
    kernels: Kernels = NO_KERNELS
    """Kernels that do a part of the work instead, on all rows at once."""

    @classmethod
    def of(cls, logits: Tensor, cast: torch.dtype, dtype: torch.dtype, smoothing: bool) -> Tiles:
        rows = max(1, TILE_BYTES[logits.device.type] // (logits[0].numel() * dtype.itemsize))
        if logits.dim() > 2:
            return cls(rows, 1, cast, dtype, smoothing)
        least = rows_that_fill(logits.device) if smoothing and logits.is_cuda else TILE_ROWS
        rows = max(least, rows // TILE_ROWS * TILE_ROWS)
        # The kernels read logits, and write their gradient, in one type.
        has_kernels = not smoothing and cast in (logits.dtype, dtype)
        kernels = kernels_for(logits, dtype) if has_kernels else NO_KERNELS
        return cls(rows, least, cast, dtype, smoothing, kernels)

    def spans(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each tile.

        A tile has more than one row if there are more: PyTorch adds a single row's numbers by
        several threads, and so in another order.
        """
        begin = 0
        while begin < rows:
            end = begin + self.rows
            end = rows if rows - end < self.least else end
            yield begin, end
            begin = end


def rows_that_fill(device: torch.device) -> int:
    """Return the least number of rows from which on PyTorch adds each with one block of threads.

    A block has 512 threads. If there are fewer rows than blocks that the GPU runs at once, several
    blocks share one row.
    """
    found = torch.cuda.get_device_properties(device)
    blocks = found.multi_processor_count * (found.max_threads_per_multi_processor // 512)
    return (blocks // TILE_ROWS + 1) * TILE_ROWS


class _DeferredInput(NamedTuple):
    """What the backward pass needs to know of deferred logits."""

    watch: Watch
    follower: Tensor
    """Follows the logits in the graph."""


class _Given(NamedTuple):
    """Inputs of a forward pass besides the tensor that represents the logits in the graph."""

    half: Tensor | None
    """The half-precision logits, if the logits are deferred."""
    deferred: _DeferredInput | None
    rows: Targets
    tiles: Tiles


class _LogProbabilities(torch.autograd.Function):
    """The log-probabilities of the targets (N, ...), and each row's sum of all (N)."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, given: _Given) -> tuple[Tensor, Tensor | None]:
        logits = place if given.half is None else given.half
        index, tiles = given.rows.classes, given.tiles
        if tiles.kernels.forward:
            picked, sums, statistics = _forward_by_kernel(logits, index, tiles)
        else:
            picked, sums, statistics = _forward_by_tiles(logits, index, tiles)
        # The targets are saved for their version, which hooks keep.
        source = given.rows.source
        ctx.save_for_backward(logits, source.target, *statistics)
        ctx.source, ctx.tiles, ctx.deferred, ctx.passes = source, tiles, given.deferred, _Passes()
        return picked, sums

    @staticmethod
    def backward(
        ctx: Any, grad_picked: Tensor, grad_sums: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        USE.differentiates_twice |= torch.is_grad_enabled()
        ctx.passes.note(grad_picked, grad_sums)
        keeper = keeper_of(ctx)
        saved = _saved(ctx)
        own = is_held_by_graph_alone(saved, keeper, aliased=ctx.deferred is not None)
        logits, _, *statistics = saved
        tiles, index = ctx.tiles, ctx.source.now().classes
        spread = _Spread(index, grad_picked, grad_sums)
        gradient = _Gradient(logits, spread, tiles, statistics, own=own)
        is_batched = _is_batched(grad_picked)
        if ctx.deferred is None:  # a gradient with a graph keeps all its tensors
            is_whole = torch.is_grad_enabled() or is_batched
            found = gradient.with_graph(ctx) if is_whole else gradient.half_precision()
        elif torch.is_grad_enabled() or is_batched or ctx.deferred.watch.is_on:
            if torch.is_grad_enabled() and is_batched:  # in which the follower's graph gets lost
                raise RuntimeError(_NOT_TWICE)
            with torch.no_grad():
                full = gradient.full_precision()
            sources = (ctx.deferred.follower, grad_picked, grad_sums)
            return (*differentiable_once([full], *sources, message=_NOT_TWICE), None)
        else:
            like = torch.empty(logits.shape, dtype=tiles.dtype, device="meta")
            found = Deferred.of(gradient, like, logits.device)
        return found, None


_is_batched: Final = torch._C._functorch.is_legacy_batchedtensor
"""Tells the gradients of `torch.autograd.grad(is_grads_batched=True)`: nothing shows their numbers,
and they cannot be written to tensors that are none."""


class _Passes:
    """Refuses a backward pass to one loss's logits both by its gradient and by that one's own.

    PyTorch adds the two before a single backward pass of the softmax, and tiles would add two.
    """

    def __init__(self) -> None:
        self._latest = -1

    def note(self, *gradients: Tensor | None) -> None:
        """Note that gradients lead to the logits in the current pass; mostly one of them is 0."""
        before, self._latest = self._latest, torch._C._current_graph_task_id()
        given = [one for one in gradients if one is not None]
        if before == self._latest and any(_is_batched(one) or one.any() for one in given):
            raise RuntimeError(_TOGETHER)


def _saved(ctx: Any) -> list[Any]:
    """Return the saved tensors; if one was changed in place, say why that is an error here."""
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if "inplace operation" in str(error):
            error.add_note(
                "A loss in tiles reads its logits again, unlike PyTorch's own loss. Change a copy "
                'of them, or use PyTorch\'s own: in a block, offload(..., loss="plain").'
            )
        raise


class _Gradient(Root):
    """The gradient of the logits: in their type, or unrounded."""

    def __init__(
        self,
        logits: Tensor,
        spread: _Spread,
        tiles: Tiles,
        statistics: Sequence[Tensor],
        *,
        own: bool,
    ) -> None:
        super().__init__()
        self._logits = logits
        self._spread = spread
        self._tiles = tiles
        self._statistics = statistics
        self._own = own
        self._has_overwritten_logits = False
        """Whether the gradient has overwritten the logits."""
        self._full_precision: Tensor | None = None

    @property
    def has_half_precision(self) -> bool:
        """Whether nothing has read the unrounded gradient."""
        return self._full_precision is None

    def with_graph(self, ctx: Any) -> Tensor:
        """Return the gradient with a graph of its own, in the logits' type.

        Its own gradient reaches the logits when PyTorch's would, behind all that was computed from
        them after the loss: what is added there is added in the same order.
        """
        logits = self._logits.view_as(self._logits)
        node: Any = logits.grad_fn
        if node is not None:
            node._set_sequence_nr(ctx._sequence_nr())
            logits.register_hook(ctx.passes.note)  # type: ignore[no-untyped-call]
        return _softmax_gradient(logits, self._spread, self._tiles).to(logits.dtype)

    def half_precision(self) -> Tensor:
        """Return the gradient in the logits' type, in their memory if that may be overwritten."""
        logits, tiles, spread = self._logits, self._tiles, self._spread
        self._check()
        self._has_overwritten_logits = self._own
        found = logits.detach() if self._own else _contiguous_like(logits)
        if tiles.kernels.backward:
            known = cuda.Statistics(*self._statistics)
            cuda.backward(logits, spread.classes, spread.picked.contiguous(), known, found)
            torch.autograd.graph.increment_version(found)
            return found
        self._fill(found)
        return found

    def full_precision(self) -> Tensor:
        """Return the unrounded gradient, in the type of the log-probabilities."""
        if self._full_precision is None:
            self._check()
            # Batched where the gradient of the loss is.
            self._full_precision = self._spread.picked.new_empty(self._logits.shape)
            self._fill(self._full_precision)
        return self._full_precision

    def _fill(self, found: Tensor) -> None:
        logits, tiles = self._logits, self._tiles
        for begin, end in tiles.spans(len(logits)):
            part = self._spread.part(begin, end)
            found[begin:end] = _softmax_gradient(logits[begin:end], part, tiles)

    def _check(self) -> None:
        if self._has_overwritten_logits:
            raise RuntimeError(f"the gradient of float() of logits is read twice; {ADVICE}")


def _contiguous_like(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=_CONTIGUOUS)


_Found = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]
"""The targets' log-probabilities, all rows' sums of them, and inputs of the backward kernel."""


def _forward_by_tiles(logits: Tensor, index: Tensor, tiles: Tiles) -> _Found:
    index = index.unsqueeze(1)
    picked, sums, statistics = [], [], []
    for begin, end in tiles.spans(len(logits)):
        log_probs = _log_softmax(logits[begin:end], tiles)
        picked.append(log_probs.gather(1, index[begin:end]).squeeze(1))
        if tiles.smoothing:
            sums.append(log_probs.sum(1))
        if tiles.kernels.backward:
            statistics.append(statistics_of(logits[begin:end], log_probs))
        del log_probs  # before the next are made
    found = tuple(torch.cat(parts) for parts in zip(*statistics, strict=True))
    return torch.cat(picked), torch.cat(sums) if sums else None, found


def _forward_by_kernel(logits: Tensor, index: Tensor, tiles: Tiles) -> _Found:
    """Return the same without sums, which the kernel does not compute."""
    picked, *others = (logits.new_empty(len(logits), dtype=tiles.dtype) for _ in range(3))
    statistics = cuda.Statistics(*others)
    cuda.forward(logits, index, picked, statistics)
    return picked, None, statistics


class _Spread(NamedTuple):
    """The gradient of log-probabilities: of each target's (N, ...), and of a row's sum (N)."""

    classes: Tensor
    picked: Tensor
    sums: Tensor | None

    def part(self, begin: int, end: int) -> _Spread:
        """Return the gradient of some rows."""
        sums = None if self.sums is None else self.sums[begin:end]
        return _Spread(self.classes[begin:end], self.picked[begin:end], sums)

    def over(self, log_probs: Tensor) -> Tensor:
        """Return the gradient as a tensor of the log-probabilities' shape and type."""
        spread = self.picked.new_zeros(log_probs.shape)  # batched where `picked` is
        spread.scatter_(1, self.classes.unsqueeze(1), self.picked.unsqueeze(1))
        if self.sums is None:
            return spread
        # Before it adds, autograd rounds a gradient to the type of the differentiated tensor.
        return spread.add_(self.sums.unsqueeze(1).to(spread.dtype))


def _log_softmax(logits: Tensor, tiles: Tiles) -> Tensor:
    dtype = tiles.dtype
    if tiles.cast != dtype:
        logits = logits.to(tiles.cast)
    if logits.dtype != dtype or not logits.is_contiguous():
        logits = logits.to(dtype, copy=True, memory_format=_CONTIGUOUS)
    return torch.log_softmax(logits, 1, dtype=dtype)  # autocast does not change a given type


def _softmax_gradient(logits: Tensor, spread: _Spread, tiles: Tiles) -> Tensor:
    """Return the gradient of logits, rounded to the type that they are cast to."""
    log_probs, dtype = _log_softmax(logits, tiles), tiles.dtype
    gradient = torch._log_softmax_backward_data(spread.over(log_probs), log_probs, 1, dtype)
    return gradient.to(tiles.cast)
