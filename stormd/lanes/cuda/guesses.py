"""Which encoder a tensor will probably need: that which the ones like it have needed. Pure.

The device chooses a tensor's mode and the host does not wait for it, so without a guess encoders
for all modes are launched, of which one works. Steps are alike, and tensors of one size and type in
them mostly are. A guess that was wrong costs bytes, since that tensor is stored raw, and nothing
else; so it is made only of what has been the same for a while.
"""

from __future__ import annotations

from typing import Final

from storm_kernels.ancf import DType
from storm_kernels.ancf.cuda_launches import pipeline_of

__all__ = ["SAME_BEFORE", "Guesses"]

SAME_BEFORE: Final = 16
"""Tensors of a size and type that needed the same encoder before it is guessed of the next. After a
wrong guess twice as many as the last time."""

MOST_KINDS: Final = 4096
"""Sizes and types that are known; beyond them all are forgotten."""


class Guesses:
    """What one session's tensors have needed. For one thread."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, DType], _Kind] = {}

    def likely(self, nbytes: int, dtype: DType) -> str | None:
        """Return the pipeline that is likely for so many bytes of that type; None where unknown."""
        kind = self._kinds.get((nbytes, dtype))
        return None if kind is None else kind.likely()

    def learn(self, nbytes: int, dtype: DType, guessed: str | None, mode: str) -> None:
        """Note the mode of a blob that was encoded with that guess, or None."""
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault((nbytes, dtype), _Kind())
        kind.learn(guessed, pipeline_of(mode))


class _Kind:
    """Tensors of one size and type: the last ones' pipeline, and how many of them there were."""

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
