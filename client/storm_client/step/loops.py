"""`micro_batches`: the loop for gradient accumulation, which the plan keeps as a loop.

    def step(x, y):
        for a, b in storm.micro_batches((x, y), 8):
            (loss(model(a), b) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()

Outside of a capture it is a plain generator of views. While a step is captured, it yields at most
three micro-batches. The first may differ from the others: it creates gradients, to which the rest
add. The third shows whether all others do the same as the second.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from storm_client.errors import UsageError
from storm_client.step.variables import identified, is_plain

if TYPE_CHECKING:
    from storm_client.step.recording import Recording

__all__ = ["CAPTURING", "Loop", "micro_batches"]

CAPTURED = 3
"""The most micro-batches of a loop that are recorded."""

Batch = TypeVar("Batch")


class Loop:
    """The captured loop over a step's micro-batches."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.count = 0
        self.leaves: list[Any] = []
        """The nodes of the step's arguments that are divided."""
        self.slices: list[list[Any]] = []
        """For each recorded micro-batch, the placeholder of each leaf's slice."""

    def iterate(self, leaves: list[torch.Tensor], count: int) -> Iterator[list[torch.Tensor]]:
        """Yield the slices of some tensors for each recorded micro-batch, three at most."""
        recording = self.recording
        if self.count:
            raise UsageError(
                "a captured step has one loop over storm.micro_batches; put both into one, or "
                "compile two steps"
            )
        self.count = count
        self.leaves = [recording.node_of(leaf) for leaf in leaves]
        if any(node.op != "placeholder" for node in self.leaves):
            raise UsageError(
                "storm.micro_batches divides arguments of the step; divide first, and compute "
                "with the parts inside of the loop"
            )
        for number in range(min(count, CAPTURED)):
            recording.micro_batch = number + 1
            parts = [_rows_of(leaf, 0, count) for leaf in map(recording._faked, leaves)]
            made = [recording.fresh(part) for part in parts]
            self.slices.append([recording.node_of(one) for one in made])
            yield made
        recording.micro_batch = -1


class _Capturing(threading.local):
    loop: Loop | None = None


CAPTURING = _Capturing()
"""The loop of the step that this thread captures."""


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield `count` equal micro-batches of a batch: slices of the rows of each tensor in it.

    `batch` is a tensor, or lists, tuples and dicts of tensors; other values are in each
    micro-batch. The slices are views. In a step of `compile_step` the body of the loop is captured
    once and run `count` times, so that neither the graph nor its memory grows with `count`. The
    body's Python code runs for at most three micro-batches, and the rest repeat the third. Only the
    last values of variables reach the next micro-batch and the code after the loop: sum losses up,
    rather than listing them. The body must not count in Python, either: a number that changes with
    each micro-batch would stop at the third. Nor may it leave the loop early.

    Raises:
        UsageError: `count` is no integer of at least 1, a tensor's rows are not divisible by it, or
            there is no tensor. In a capture also: a variable of the loop's function counts
            micro-batches, or the loop is left early.
    """
    if type(count) is not int or count < 1:
        raise UsageError(f"count is {count!r}; it must be a number of micro-batches, at least 1")
    leaves, spec = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise UsageError("the batch has no tensor to divide; pass a tensor, or a tree of tensors")
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] % count:
            raise UsageError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be divided into {count} equal "
                "parts of its rows; choose a count that divides them"
            )
    loop = CAPTURING.loop
    if loop is not None:
        return _watched(_rebuilt(loop.iterate(tensors, count), leaves, spec), count)
    divided = ([_rows_of(one, number, count) for one in tensors] for number in range(count))
    return _rebuilt(divided, leaves, spec)


def _rebuilt(divided: Iterator[list[torch.Tensor]], leaves: list[Any], spec: Any) -> Iterator[Any]:
    for parts in divided:
        rest = iter(parts)
        yield pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )


def _watched(parts: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield a capture's micro-batches; raise if the third leaves other numbers than the second."""
    before: dict[str, Any] = {}
    for number, part in enumerate(parts):
        yield part
        after = _numbers_of(sys._getframe(1))
        changed = [name for name, value in after.items() if before.get(name) != value]
        if number + 1 == CAPTURED < count and changed:
            raise UsageError(
                f"the loop over storm.micro_batches changes its variable {changed[0]!r} with each "
                f"part, but of {count} its Python code runs for {CAPTURED} alone; count outside of "
                "the loop, or with a tensor"
            )
        before = after


def _numbers_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function whose values are plain."""
    found = frame.f_locals.items()
    return {name: identified(value) for name, value in found if is_plain(value)}


def _rows_of(tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    rows = tensor.shape[0] // count
    return tensor.narrow(0, number * rows, rows)
