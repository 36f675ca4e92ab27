"""Predicts which encoder a tensor will need: the one that similar tensors have needed. Pure.

The device chooses a tensor's mode and the host does not wait for it. So without a guess, encoders
for all modes are launched, of which one works. Steps are alike, and so are most tensors of one size
and type in them. A wrong guess only costs bytes, since that tensor is stored raw. So a tensor's
encoder is guessed only after it has been the same for a while.
"""

from __future__ import annotations

from typing import Final

from storm_kernels.ancf import DType
from storm_kernels.ancf.cuda_launches import pipeline_of

__all__ = ["SAME_BEFORE", "Guesses"]

SAME_BEFORE: Final = 16
"""How many tensors of one size and type must have needed the same encoder before it is guessed for
the next. Each wrong guess doubles the number."""

MAX_KINDS: Final = 4096
"""Most pairs of size and type that are known; when there are more, all are forgotten."""


class Guesses:
    """The encoders that one session's tensors have needed. For one thread."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, DType], _Kind] = {}

    def likely(self, nbytes: int, dtype: DType) -> str | None:
        """Return the likely pipeline for so many bytes of that type; None if unknown."""
        kind = self._kinds.get((nbytes, dtype))
        return None if kind is None else kind.likely()

    def learn(self, nbytes: int, dtype: DType, guessed: str | None, mode: str) -> None:
        """Note the mode of a blob that was encoded with that guess, or with None."""
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault((nbytes, dtype), _Kind())
        kind.learn(guessed, pipeline_of(mode))


class _Kind:
    """Tensors of one size and type: the latest ones' pipeline, and how many needed it in a row."""

    __slots__ = ("_needed", "_pipeline", "_same")

    def __init__(self) -> None:
        self._pipeline: str | None = None
        self._same = 0
        self._needed = SAME_BEFORE

    def likely(self) -> str | None:
        return self._pipeline if self._same >= self._needed else None

    def learn(self, guessed: str | None, found: str | None) -> None:
        if found is not None and found == self._pipeline:
            self._same += 1
            return
        if guessed is not None:
            self._needed *= 2
        self._pipeline, self._same = found, 1
