"""What a loss makes of its targets, in the forward pass and again in the backward pass.

PyTorch's backward pass reads the targets themselves. So what was made of them is not saved for it,
but made again: then a change has the effect that it has on PyTorch's own loss.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

__all__ = ["IGNORED", "Source", "Targets"]

IGNORED: Final = -100
"""Marks an ignored target in a column where all others are 0."""


class Source(NamedTuple):
    """The targets that a loss was given."""

    target: Tensor
    """int64."""
    version: int
    """In the forward pass; 0 for inference tensors, which no backward pass reads."""
    classes: int
    """Number of classes."""
    ignore_index: int

    def now(self) -> Targets:
        """Return what is made of them in the backward pass.

        Raises:
            RuntimeError: they were modified in place, and their version shows it.
        """
        now = _version(self.target)
        if now != self.version:
            raise RuntimeError(
                f"the targets of a loss, {list(self.target.shape)}, were changed in place after "
                f"the loss was computed (version {self.version}, now {now}), and its backward pass "
                "reads them; change a copy of them"
            )
        return Targets.of(self.target, self.classes, self.ignore_index)


class Targets(NamedTuple):
    """For each target, the class to look up, and whether the target counts."""

    source: Source
    classes: Tensor
    """int64, of the targets' shape; 0 for targets that do not count."""
    column: Tensor
    """0 for a valid target, IGNORED for an ignored one. An invalid one is itself, or -1 if it
    equals IGNORED: nll_loss rejects any of these by its number."""
    ignored: Tensor

    @classmethod
    def of(cls, target: Tensor, classes: int, ignore_index: int) -> Targets:
        source = Source(target, _version(target), classes, ignore_index)
        ignored = target == ignore_index
        index = target.clamp(0, classes - 1)
        column = target.masked_fill(target == IGNORED, -1).masked_fill_(index == target, 0)
        column = column.masked_fill_(ignored, IGNORED)
        return cls(source, index.masked_fill_(ignored, 0), column, ignored)


def _version(target: Tensor) -> int:
    return 0 if target.is_inference() else target._version
