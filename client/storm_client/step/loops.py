"""`micro_batches`: the construct for gradient accumulation, a loop of the plan and not unrolled.

    def step(x, y):
        for a, b in storm.micro_batches((x, y), 8):
            (loss(model(a), b) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()

Outside of a capture it is a plain generator of views. While a step is captured it yields three
micro-batches at the most: the first may be different from others (gradients are made in it and
added to in the rest), and the third shows whether the second is what all others do.
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
from storm_client.step.variables import PLAIN, identified

if TYPE_CHECKING:
    from storm_client.step.recording import Recording

__all__ = ["CAPTURING", "Loop", "micro_batches"]

CAPTURED = 3
"""Micro-batches that are recorded of a loop."""

Batch = TypeVar("Batch")


class Loop:
    """What is captured of the loop over micro-batches of a step."""

    def __init__(self, recording: Recording) -> None:
        """Begin without one."""
        self.recording = recording
        self.count = 0
        self.leaves: list[Any] = []
        """What is divided: nodes of the step's arguments."""
        self.slices: list[list[Any]] = []
        """For each recorded micro-batch, the placeholder of each leaf's part."""

    def iterate(self, leaves: list[torch.Tensor], count: int) -> Iterator[list[torch.Tensor]]:
        """Yield the parts of some tensors, three times at the most."""
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
            recording.part = number + 1
            parts = [_part(leaf, 0, count) for leaf in map(recording._faked, leaves)]
            made = [recording.fresh(part) for part in parts]
            self.slices.append([recording.node_of(one) for one in made])
            yield made
        recording.part = -1


class _Capturing(threading.local):
    loop: Loop | None = None


CAPTURING = _Capturing()
"""The loop of the step that this thread captures."""


def micro_batches(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield `count` equal parts of a batch: of each tensor in it, `count` parts of its rows.

    `batch` is a tensor, or lists, tuples and dicts of tensors; what is no tensor is in each part.
    The parts are views. In a step of `compile_step` the body of the loop is captured once and run
    `count` times, so that neither the graph nor its memory grows with `count`: its Python code runs
    for three parts, and the rest do what the third did. What a part hands to the next, and to what
    follows the loop, are the last values of variables: sum losses up, rather than listing them. Nor
    may the body count in Python: a number that changes from part to part would stop at the third.

    Raises:
        UsageError: `count` is no number of at least 1, a tensor's rows are not divisible by it,
            there is no tensor, or a variable of the loop's function counts parts in a capture.
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
    divided = ([_part(one, number, count) for one in tensors] for number in range(count))
    return _rebuilt(divided, leaves, spec)


def _rebuilt(divided: Iterator[list[torch.Tensor]], leaves: list[Any], spec: Any) -> Iterator[Any]:
    for parts in divided:
        rest = iter(parts)
        yield pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )


def _watched(parts: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield the parts of a capture; raise where the third leaves other numbers than the second."""
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
    """Return the variables of a function that runs which are no objects."""
    found = frame.f_locals.items()
    return {name: identified(value) for name, value in found if isinstance(value, PLAIN)}


def _part(tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    rows = tensor.shape[0] // count
    return tensor.narrow(0, number * rows, rows)
