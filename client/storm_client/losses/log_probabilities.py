"""Log-probabilities of targets, and their gradient, for one tile of rows at a time.

Logits may be deferred (`deferred.py`): then they are read in half precision, and their gradient is
deferred in turn, until it is cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from storm_kernels.loss import cuda
from torch import Tensor

from storm_client.losses.deferred import ADVICE, USE, Deferred, Root, Watch
from storm_client.losses.kernels import NO_KERNELS, Kernels, kernels_for, statistics_of
from storm_client.losses.sole_holder import is_held_by_graph_alone, keeper_of

__all__ = ["TILE_BYTES", "log_probabilities", "rows_that_fill"]

TILE_BYTES: Final = {"cpu": 4 << 20, "cuda": 32 << 20}
"""What the log-probabilities of one tile take: what a cache holds. Smaller logits are PyTorch's."""

TILE_ROWS: Final = 8
"""Tiles begin at multiples of it, so that on a GPU rows lie in the same place of a 16-byte vector
as without tiles, which decides in what order PyTorch adds there."""

_CONTIGUOUS: Final = torch.contiguous_format


def log_probabilities(
    logits: Tensor,
    index: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    *,
    smoothing: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the targets' log-probabilities (N, ...) and, with `smoothing`, rows' sums of all (N).

    Args:
        logits: (N, C, ...) of more than a tile.
        index: a class for each target (N, ...), int64.
        weight: of each class (C), for the sums.
        dtype: of log-probabilities.
        smoothing: whether sums are wanted.
    """
    halves, watch = None, None
    if isinstance(logits, Deferred):
        halves, watch = logits.halves(), logits.root.watch
        if halves is None:
            logits, watch = logits.there(), None
        else:  # an alias that nobody else has, so that who holds another can be counted
            halves = halves.detach()
    tiles = Tiles.of(logits if halves is None else halves, dtype, smoothing)
    apply: Any = _LogProbabilities.apply
    found: tuple[Tensor, Tensor | None] = apply(logits, _Given(halves, watch, index, weight, tiles))
    return found


class Tiles(NamedTuple):
    """How logits are cut: rows a tile, the type of log-probabilities, whether sums are wanted."""

    rows: int
    least: int
    """What would be a last tile of fewer rows belongs to the one before."""
    dtype: torch.dtype
    smoothing: bool
    kernels: Kernels = NO_KERNELS
    """What of the work kernels do instead, on all rows at once."""

    @classmethod
    def of(cls, logits: Tensor, dtype: torch.dtype, smoothing: bool) -> Tiles:
        rows = max(1, TILE_BYTES[logits.device.type] // (logits[0].numel() * dtype.itemsize))
        if logits.dim() > 2:
            return cls(rows, 1, dtype, smoothing)
        least = rows_that_fill(logits.device) if smoothing and logits.is_cuda else TILE_ROWS
        rows = max(least, rows // TILE_ROWS * TILE_ROWS)
        kernels = NO_KERNELS if smoothing else kernels_for(logits, dtype)
        return cls(rows, least, dtype, smoothing, kernels)

    def spans(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield where tiles begin and end.

        A tile has more than one row where there are: PyTorch adds a single row's numbers by several
        threads, and so in another order.
        """
        begin = 0
        while begin < rows:
            end = begin + self.rows
            end = rows if rows - end < self.least else end
            yield begin, end
            begin = end


def rows_that_fill(device: torch.device) -> int:
    """Return from how many rows on PyTorch has each added by one block of threads.

    Of fewer rows than the GPU runs blocks at once, which have 512 threads, several share one.
    """
    found = torch.cuda.get_device_properties(device)
    blocks = found.multi_processor_count * (found.max_threads_per_multi_processor // 512)
    return (blocks // TILE_ROWS + 1) * TILE_ROWS


class _Given(NamedTuple):
    """What a forward pass is given beside what stands for the logits in the graph."""

    halves: Tensor | None
    """The logits, where those are deferred."""
    watch: Watch | None
    classes: Tensor
    """Of each target."""
    weight: Tensor | None
    tiles: Tiles


class _LogProbabilities(torch.autograd.Function):
    """The log-probabilities of the targets (N, ...), and each row's sum of all (N)."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, given: _Given) -> tuple[Tensor, Tensor | None]:
        logits = place if given.halves is None else given.halves
        index, weight, tiles = given.classes, given.weight, given.tiles
        forward = _forward_by_kernel if tiles.kernels.forward else _forward_by_tiles
        picked, sums, statistics = forward(logits, index, weight, tiles)
        ctx.save_for_backward(logits, index, weight, *statistics)
        ctx.tiles, ctx.watch = tiles, given.watch
        return picked, sums

    @staticmethod
    def backward(
        ctx: Any, grad_picked: Tensor, grad_sums: Tensor | None
    ) -> tuple[Tensor | None, None]:
        USE.differentiates_twice |= torch.is_grad_enabled()
        keeper = keeper_of(ctx)
        saved = list(ctx.saved_tensors)
        own = is_held_by_graph_alone(saved, keeper, aliased=ctx.watch is not None)
        logits, index, weight, *statistics = saved
        tiles, spread = ctx.tiles, _Spread(index, grad_picked, grad_sums, weight)
        gradient = _Gradient(logits, spread, tiles, statistics, own=own)
        if ctx.watch is None:  # of a gradient that has a graph all is kept
            found = gradient.kept() if torch.is_grad_enabled() else gradient.halves()
        elif torch.is_grad_enabled() or ctx.watch.is_on:
            found = _differentiable_once(gradient.values())
        else:
            like = torch.empty(logits.shape, dtype=tiles.dtype, device="meta")
            found = Deferred.of(gradient, like, logits.device)
        return found, None


class _Gradient(Root):
    """The logits' gradient: in their type, or unrounded."""

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
        self._is_taken = False
        """Whether it lies where the logits were."""
        self._values: Tensor | None = None

    @property
    def has_halves(self) -> bool:
        """Whether nobody has looked at what is not rounded."""
        return self._values is None

    def kept(self) -> Tensor:
        """Return it with a graph of its own, in the logits' type."""
        return _softmax_gradient(self._logits, self._spread, self._tiles.dtype).to(
            self._logits.dtype
        )

    def halves(self) -> Tensor:
        """Return it in the logits' type, in their memory where that may be written to."""
        logits, tiles, spread = self._logits, self._tiles, self._spread
        self._check()
        self._is_taken = self._own
        found = logits.detach() if self._own else _contiguous_like(logits, logits.dtype)
        if tiles.kernels.backward:
            known = cuda.Statistics(*self._statistics)
            cuda.backward(logits, spread.classes, spread.picked.contiguous(), known, found)
            torch.autograd.graph.increment_version(found)
            return found
        self._fill(found)
        return found

    def values(self) -> Tensor:
        """Return it in the type of log-probabilities, not rounded."""
        if self._values is None:
            self._check()
            self._values = _contiguous_like(self._logits, self._tiles.dtype)
            self._fill(self._values)
        return self._values

    def _fill(self, found: Tensor) -> None:
        logits, tiles = self._logits, self._tiles
        for begin, end in tiles.spans(len(logits)):
            part = self._spread.part(begin, end)
            found[begin:end] = _softmax_gradient(logits[begin:end], part, tiles.dtype)

    def _check(self) -> None:
        if self._is_taken:
            raise RuntimeError(f"the gradient of float() of logits is read twice; {ADVICE}")


def _contiguous_like(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(logits, dtype=dtype, memory_format=_CONTIGUOUS)


def _differentiable_once(gradient: Tensor) -> Tensor:
    """Return a gradient that has no graph of its own, which is an error to ask for."""
    if not torch.is_grad_enabled():
        return gradient
    message = f"a second derivative by way of float() of logits is not supported; {ADVICE}"
    delayed: Any = torch._C._functions.DelayedError(message, 1)
    found: Tensor = delayed(gradient.detach().requires_grad_())
    return found


_Found = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]
"""The targets' log-probabilities, all rows' sums of them, and what the backward kernel needs."""


def _forward_by_tiles(logits: Tensor, index: Tensor, weight: Tensor | None, tiles: Tiles) -> _Found:
    index = index.unsqueeze(1)
    picked, sums, statistics = [], [], []
    for begin, end in tiles.spans(len(logits)):
        log_probs = _log_softmax(logits[begin:end], tiles.dtype)
        picked.append(log_probs.gather(1, index[begin:end]).squeeze(1))
        if tiles.smoothing:
            sums.append((log_probs if weight is None else log_probs * weight).sum(1))
        if tiles.kernels.backward:
            statistics.append(statistics_of(logits[begin:end], log_probs))
        del log_probs  # before there are the next
    found = tuple(torch.cat(parts) for parts in zip(*statistics, strict=True))
    return torch.cat(picked), torch.cat(sums) if sums else None, found


def _forward_by_kernel(
    logits: Tensor,
    index: Tensor,
    weight: Tensor | None,  # noqa: ARG001 - of sums, which it has none of
    tiles: Tiles,
) -> _Found:
    picked, *others = (logits.new_empty(len(logits), dtype=tiles.dtype) for _ in range(3))
    statistics = cuda.Statistics(*others)
    cuda.forward(logits, index, picked, statistics)
    return picked, None, statistics


class _Spread(NamedTuple):
    """The gradient of log-probabilities: of each target's (N, ...), and of all of a row (N)."""

    classes: Tensor
    picked: Tensor
    sums: Tensor | None
    weight: Tensor | None

    def part(self, begin: int, end: int) -> _Spread:
        """Return that of some rows."""
        sums = None if self.sums is None else self.sums[begin:end]
        return _Spread(self.classes[begin:end], self.picked[begin:end], sums, self.weight)

    def over(self, log_probs: Tensor) -> Tensor:
        """Return it as a tensor of the log-probabilities' shape and type."""
        spread = torch.zeros_like(log_probs)
        spread.scatter_(1, self.classes.unsqueeze(1), self.picked.unsqueeze(1))
        if self.sums is None:
            return spread
        sums = self.sums.unsqueeze(1)
        # Autograd rounds to the type of what it is the gradient of before it adds.
        return spread.add_((sums if self.weight is None else sums * self.weight).to(spread.dtype))


def _log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    if logits.dtype != dtype or not logits.is_contiguous():
        logits = logits.to(dtype, copy=True, memory_format=_CONTIGUOUS)
    return torch.log_softmax(logits, 1, dtype=dtype)  # autocast changes no type that is given


def _softmax_gradient(logits: Tensor, spread: _Spread, dtype: torch.dtype) -> Tensor:
    """Return the gradient of logits, in the type of log-probabilities."""
    log_probs = _log_softmax(logits, dtype)
    return torch._log_softmax_backward_data(spread.over(log_probs), log_probs, 1, dtype)
