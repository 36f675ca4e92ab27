"""Watches PyTorch's functions while a block runs, and times them.

While a block with a plan to learn or with something to replay runs, each of PyTorch's functions
passes through a Recorder. It costs the host some microseconds a call, so a plan without replays
runs without.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from storm_client.blocks import untraced
from storm_client.plan.operations import Function, is_bound
from storm_client.plan.recording import Recording
from storm_client.watching import Watching, are_altered

__all__ = ["Mark", "Recorder", "Span", "mark"]

_len_dispatch_stack = torch._C._len_torch_dispatch_stack

Mark: TypeAlias = float | torch.cuda.Event
"""A moment, on the host or on a stream."""


class Recorder(Watching):
    """Hands what functions of the table make to a Recording."""

    def __init__(self, recording: Recording, *, measures: bool, times: bool = False) -> None:
        """Report to `recording`; how long each takes on a GPU is measured if `measures`.

        On a CPU it is not: what else runs there decides that. What reporting takes this thread is
        counted if that `times`.
        """
        super().__init__()
        self._recording: Recording | None = None if are_altered() else recording
        self._measures = measures
        self._times = times

    def end(self) -> None:
        """Pass everything through from now on."""
        self._recording = None
        super().end()

    @untraced
    def __torch_function__(
        self,
        function: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `function` and note what it made, unless a mode of the script may have altered it."""
        recording = self._recording
        if (
            recording is None
            or function not in recording.functions
            or _len_dispatch_stack()
            or not is_bound(function, args, kwargs or {})
        ):
            return function(*args, **kwargs) if kwargs else function(*args)
        recording.begins()
        begin = mark(is_on_gpu=True) if self._measures and _is_on_gpu(args) else None
        made = function(*args, **kwargs) if kwargs else function(*args)
        began = time.thread_time() if self._times else 0.0
        if not recording.goes_on(function, args, made):
            timing = None if begin is None else Span(begin, mark(is_on_gpu=True))
            recording.ran(function, args, kwargs or {}, made, timing)
        if self._times:
            recording.seconds += time.thread_time() - began
        return made


class Span:
    """The time between two marks, as a function of no arguments that waits for the second."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Mark, end: Mark) -> None:
        self._begin = begin
        self._end = end

    @property
    def is_known(self) -> bool:
        """Whether the second mark has been reached."""
        return _is_reached(self._end)

    @property
    def has_begun(self) -> bool:
        """Whether the first mark has been reached."""
        return _is_reached(self._begin)

    def __call__(self) -> float:
        if isinstance(self._begin, torch.cuda.Event) and isinstance(self._end, torch.cuda.Event):
            self._end.synchronize()
            return float(self._begin.elapsed_time(self._end)) / 1e3
        assert isinstance(self._begin, float)
        assert isinstance(self._end, float)
        return self._end - self._begin


def mark(*, is_on_gpu: bool) -> Mark:
    """Return the present: of this thread, or of the current stream."""
    if not is_on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _is_reached(one: Mark) -> bool:
    return isinstance(one, float) or bool(one.query())  # type: ignore[no-untyped-call]


def _is_on_gpu(arguments: Sequence[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[0], torch.Tensor) and arguments[0].is_cuda
