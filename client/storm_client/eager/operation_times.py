"""Times a step's operations on a GPU: one operation of each kind is run again with a full queue.

Two events around an operation measure its kernels only if these were queued before the device
reached them. In a watched step they are not. The time of the hooks that run meanwhile lies between
the events as well, and is several times that of a small kernel. So each operation is recorded as a
recipe. When a plan is made, the recipe runs a few times on empty memory, behind work that keeps the
device busy until all runs are queued. Afterwards it is checked that they were: where the thread was
delayed, the device is kept busy for longer.

CUPTI, through `torch.profiler`, would time all kernels as well. But it is the script's to use: a
process runs one profiler at a time, and launches stay slower once it has been loaded.

A step that begins with an expected signature has no events, since nobody knew that it would have to
be learned. Where an operation cannot be run again, as for lack of memory, the shortest time between
the events of like operations is used. That time does not show that the operation itself is slow.
While a step is learned, the stream may wait within an operation for an offload, which on a slow
link takes many times as long as the operation.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from storm_client.devices import is_capturing, unused_bytes
from storm_client.eager.bits import copied
from storm_client.eager.calls import is_plain, outputs_of, replaced, tensors_among
from storm_client.eager.operations import Function
from storm_client.eager.recompute import Input, Recipe
from storm_client.eager.sources import OtherNumbers
from storm_client.errors import StormError

if TYPE_CHECKING:
    from storm_client.eager.marks import Span
    from storm_client.native import _follow

__all__ = ["OperationTimes", "keep_busy"]

LONG_SECONDS: Final = 2e-3
"""An operation whose first run takes this long is run only once more. The first run may have loaded
kernels or searched for the fastest: 67 ms of a convolution, where a whole step takes 111."""

REPEATS: Final = 3

MAX_SECONDS: Final = 5.0
"""Limit for all kinds of operations together: one step takes that much longer, once. Remaining
kinds use their events. cuDNN makes plans for each shape of convolutions and attention, in each
thread anew."""

QUEUED_SECONDS: Final = (5e-4, 2e-3, 8e-3)
"""Seconds to keep the device busy while the repeats are queued; the next if one is too short.

An operation that itself waits for the device is never fully queued before it begins."""

CYCLES_PER_SECOND: Final = 1.7e9
"""Approximate clock of a data-centre GPU. A faster one is kept busy for less time."""

MIN_FREE: Final = 2.0
"""Free memory needed to run an operation again, as a multiple of the operation's memory."""

Timing: TypeAlias = Callable[[], float]


def keep_busy(seconds: float) -> None:
    """Keep the current device's stream busy for about `seconds`, without other effect."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]  # torch's gap


class OperationTimes:
    """Times the operations of steps. The times are available once the step has ended.

    All step signatures share the times.
    """

    def __init__(self) -> None:
        """Start without an operation."""
        self._kinds: dict[object, _Repeated] = {}
        self._spent = 0.0

    def of(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        made: Any,
        span: Span | None = None,
        *,
        draw: _follow.Draw | None = None,
        casts: bool = True,
    ) -> Timing | None:
        """Return a function that times an operation that has just run, within `span` if given.

        `draw` holds the random numbers that it has drawn; None for none. Without `casts` autocast
        was off while it ran.

        Returns None for an operation without a span that cannot be told apart from others.
        """
        try:
            key = function, casts, _likeness(arguments), _likeness(options.items())
            kind = self._kinds.get(key)
        except TypeError:  # an argument that cannot be told apart from others
            return span
        if kind is None:
            kind = self._kinds[key] = _Repeated(
                self, function, arguments, options, draw, casts=casts
            )
            kind.nbytes += sum(one.nbytes for one in tensors_among(outputs_of(made)))
        if span is not None:
            kind.record_span(span)
        return kind

    def allows(self) -> bool:
        """Return whether there is time left to run operations again."""
        return self._spent < MAX_SECONDS

    def spent(self, seconds: float) -> None:
        """Record that running operations again has taken `seconds`."""
        self._spent += seconds


class _Repeated:
    """A kind of like operations, and the time that one of them takes."""

    def __init__(
        self,
        times: OperationTimes,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        draw: _follow.Draw | None,
        *,
        casts: bool,
    ) -> None:
        self._times = times
        self._places: list[_Place] = []
        """Placeholders for the tensors among the arguments."""
        self.nbytes = 0
        """Bytes of its arguments and results."""
        self._device: torch.device = arguments[0].device
        self._recipe = Recipe(
            function,
            [replaced(argument, self._place) for argument in arguments],
            {name: replaced(value, self._place) for name, value in options.items()},
            "cuda",
            draw,
            casts=casts,
        )
        self._shortest = math.inf
        """Shortest time in seconds between the events of one operation."""
        self._spans: deque[Span] = deque()
        """Spans between events that the device, as far as is known, has not reached."""
        self._seconds: float | None = None
        """The answer, once it was asked for."""

    def record_span(self, span: Span) -> None:
        """Record the span between the events of one operation, and evaluate spans already reached.

        Otherwise spans of steps that are never planned, such as failed ones, would accumulate.
        """
        if self._seconds is not None:
            return
        with suppress(IndexError):  # another thread may have taken the last
            while self._spans[0].is_known:
                self._shortest = min(self._shortest, self._spans.popleft()())
        self._spans.append(span)

    def __call__(self) -> float:
        """Return the seconds, or 0.0 where they cannot be known; waits for the device."""
        if self._seconds is None:
            shortest = min([self._shortest, *(span() for span in self._spans)])
            if self._may_run():
                shortest = min(shortest, self._repeated_beside())
            self._seconds = shortest if math.isfinite(shortest) else 0.0
            self._spans.clear()
            self._places.clear()
        return self._seconds

    def _may_run(self) -> bool:
        if not self._times.allows() or is_capturing(self._device):
            return False
        return MIN_FREE * self.nbytes <= unused_bytes(self._device)

    def _repeated_beside(self) -> float:
        """Run it in a thread of its own; return the seconds, infinity where it cannot be run.

        In this thread it would use up autograd's sequence numbers, by which the backward pass
        orders its sums.

        Raises:
            OtherNumbers: another thread has drawn random numbers at the same time.
        """
        found: list[float | OtherNumbers] = []

        def run() -> None:
            with suppress(RuntimeError, TypeError, StormError):  # out of memory is a RuntimeError
                try:
                    found.append(self._repeated())
                except OtherNumbers as error:
                    found.append(error)

        thread = threading.Thread(target=run, name="storm-timing", daemon=True)
        thread.start()
        thread.join()
        took = found[0] if found else math.inf
        if isinstance(took, OtherNumbers):
            raise took
        return took

    def _repeated(self) -> float:
        """Run it some times in a row; return the seconds of one run."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # earlier work in the queue must not count
            began = time.perf_counter()
            try:
                for place in self._places:
                    place.fill()
                first, _ = self._timed(1)  # the first run takes longer than the others
                return first if first >= MAX_SECONDS else self._behind_a_full_queue(first)
            finally:
                for place in self._places:
                    place.clear()
                self._times.spent(time.perf_counter() - began)

    def _behind_a_full_queue(self, first: float) -> float:
        """Return its seconds where all runs are queued before it begins; `first` is the first's."""
        found = math.inf
        for busy in QUEUED_SECONDS:
            keep_busy(busy)
            took, is_full = self._timed(REPEATS if min(first, found) < LONG_SECONDS else 1)
            found = min(found, took)
            if is_full:
                break
        return found

    def _timed(self, times: int) -> tuple[float, bool]:
        """Return the seconds of the fastest run, and whether all runs were queued in time."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            self._recipe.run()
            event.record()
        is_full = not events[0].query()  # type: ignore[no-untyped-call]
        events[-1].synchronize()
        taken = (begin.elapsed_time(end) for begin, end in itertools.pairwise(events))
        return min(map(float, taken)) / 1e3, is_full

    def _place(self, tensor: torch.Tensor) -> Input:
        place = _Place(tensor)
        self._places.append(place)
        self.nbytes += tensor.nbytes
        return Input(place, tensor.requires_grad and tensor.is_floating_point())


class _Place:
    """Memory with a tensor's layout but without its contents, held only while it is needed.

    The contents of integer tensors are kept, since indices and group boundaries decide how long an
    operation takes.
    """

    __slots__ = ("_device", "_dtype", "_held", "_integers", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        is_number = tensor.is_floating_point() or tensor.is_complex()
        self._integers = None if is_number else copied(tensor)
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._held: torch.Tensor | None = None

    def fill(self) -> None:
        """Allocate the memory."""
        self._held = self._integers
        if self._held is None:
            self._held = torch.empty_strided(
                self._shape, self._stride, dtype=self._dtype, device=self._device
            )

    def tensor(self) -> torch.Tensor:
        """Return the memory as a tensor, as a source of a recipe."""
        assert self._held is not None
        return self._held

    def clear(self) -> None:
        """Free the memory."""
        self._held = None


def _likeness(arguments: Iterable[Any]) -> tuple[object, ...]:
    """Return a key that like arguments share: tensors count by all but their contents."""
    return tuple(map(_alike, arguments))


def _alike(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        if not is_plain(argument):
            raise TypeError("it has no strides, or may run anything")
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return _likeness(argument)
    hash(argument)
    return type(argument), argument
