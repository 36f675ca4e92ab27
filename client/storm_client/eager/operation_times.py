"""How long operations of a step take on a GPU: each kind of them is run again with a full queue.

What lies between two events around an operation is what its kernels took only if they were queued
before the device came to them. In a step that is watched they are not: what hooks do while the
operation runs lies between the events, too, and is several times what a small kernel takes. So what
is needed to run an operation again is noted, and where the plan is made it runs a few times on
empty memory, behind something that keeps the device busy until all of it is queued. Whether it was
is looked at: where the thread was delayed meanwhile, the device is kept busy for longer.

CUPTI, by `torch.profiler`, would tell the same of all kernels. It is the script's own to use: one
profiler runs at a time in a process, and launches stay slower once it has been loaded.

A step that others were seen before has no events: nobody knew that it would have to be learned.
Where an operation cannot be run, as for want of memory, events have to do, the shortest of those
that are alike. They say nothing of whether it takes long: while a step is learned the stream may
wait within an operation for what has been saved to leave, which on a slow link takes many times as
long as the operation.
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

from storm_client.devices import is_capturing
from storm_client.eager.bits import copied
from storm_client.eager.calls import outputs_of, replaced, tensors_among
from storm_client.eager.operations import Function
from storm_client.eager.recompute import Input, Recipe
from storm_client.eager.sources import OtherNumbers
from storm_client.eager.step_times import Duration
from storm_client.errors import StormError

if TYPE_CHECKING:
    from storm_client.native import _follow

__all__ = ["OperationTimes", "keep_busy"]

LONG_SECONDS: Final = 2e-3
"""What takes so long when it is run again is run only once more: the first run may have loaded its
kernels, or looked for the fastest: 67 ms of a convolution, where a whole step takes 111."""

REPEATS: Final = 3

MOST_SECONDS: Final = 5.0
"""For all kinds of operations together: once, a step takes so much longer. What is left then goes
by events. For convolutions and attention cuDNN makes plans of each shape, in each thread anew."""

QUEUED_SECONDS: Final = (5e-4, 2e-3, 8e-3)
"""For which the device is kept busy while the repeats are queued; more where that is too short.

An operation that waits for the device itself has never been queued before it begins."""

CYCLES_PER_SECOND: Final = 1.7e9
"""Of a data-centre GPU's clock, about. One that is faster is kept busy for less."""

LEAST_FREE: Final = 2.0
"""How many times the memory of an operation has to be free for it to be run again."""

Timing: TypeAlias = Callable[[], float]


def keep_busy(seconds: float) -> None:
    """Have the current device's stream do nothing for about so long."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]  # torch's gap


class OperationTimes:
    """Times the operations of steps. They may be asked for once the step has ended.

    What was timed for one step signature is known to others.
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
        span: Duration | None = None,
        *,
        draw: _follow.Draw | None = None,
        casts: bool = True,
    ) -> Timing | None:
        """Return what tells how long an operation takes that has just run, within `span` if given.

        `draw` is what it has drawn of random numbers, None for none. Without `casts` autocast was
        off while it ran.

        None where nothing can: nobody can tell it from others, and it was not timed.
        """
        try:
            key = function, casts, _likeness(arguments), _likeness(options.items())
            kind = self._kinds.get(key)
        except TypeError:  # an argument that cannot be told from others
            return span
        if kind is None:
            kind = self._kinds[key] = _Repeated(
                self, function, arguments, options, draw, casts=casts
            )
            kind.nbytes += sum(one.nbytes for one in tensors_among(outputs_of(made)))
        if span is not None:
            kind.took(span)
        return kind

    def allows(self) -> bool:
        """Tell whether there is time left to run operations again."""
        return self._spent < MOST_SECONDS

    def spent(self, seconds: float) -> None:
        """Note that so much of it has gone."""
        self._spent += seconds


class _Repeated:
    """Operations that are alike, and how long one of them takes."""

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
        """What stands for the tensors among the arguments."""
        self.nbytes = 0
        """Of memory that it takes, arguments and results."""
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
        """Seconds between the events of one of them."""
        self._spans: deque[Duration] = deque()
        """Between the events of those that the device has yet to come to, as far as is known."""
        self._seconds: float | None = None
        """What was answered."""

    def took(self, span: Duration) -> None:
        """Note what lies between the events of one of them.

        Those of steps that are never planned, as of steps that fail, would otherwise only add up.
        """
        if self._seconds is not None:
            return
        with suppress(IndexError):  # another thread may have taken the last
            while self._spans[0].is_known:
                self._shortest = min(self._shortest, self._spans.popleft()())
        self._spans.append(span)

    def __call__(self) -> float:
        """Return the seconds, 0.0 where they cannot be known; waits for the device."""
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
        free, _ = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device)
        unused -= torch.cuda.memory_allocated(self._device)
        return LEAST_FREE * self.nbytes <= free + unused

    def _repeated_beside(self) -> float:
        """Run it in a thread of its own; return what it took, infinity where it cannot be run.

        In this one it would take numbers by which the backward pass orders what it adds up.

        Raises:
            OtherNumbers: somebody else has drawn random numbers at the same time.
        """
        found: list[float | OtherNumbers] = []

        def run() -> None:
            with suppress(RuntimeError, TypeError, StormError):  # of which memory's is one
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
        """Run it some times in a row; return what one of them took."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()  # what is queued before is not its own
            began = time.perf_counter()
            try:
                for place in self._places:
                    place.fill()
                self._recipe.takes_present_settings()
                first, _ = self._timed(1)  # what that takes is not what the others do
                return first if first >= MOST_SECONDS else self._behind_a_full_queue(first)
            finally:
                for place in self._places:
                    place.clear()
                self._times.spent(time.perf_counter() - began)

    def _behind_a_full_queue(self, first: float) -> float:
        """Return what it takes where all is queued before it begins; the first run took `first`."""
        found = math.inf
        for busy in QUEUED_SECONDS:
            keep_busy(busy)
            took, is_full = self._timed(REPEATS if min(first, found) < LONG_SECONDS else 1)
            found = min(found, took)
            if is_full:
                break
        return found

    def _timed(self, times: int) -> tuple[float, bool]:
        """Return what the quickest of some runs took, and whether all were queued before."""
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
    """Memory like a tensor's, without what was in it, while that is needed.

    Integers are kept: where another tensor is looked up, or how far a group reaches, decides what
    an operation takes.
    """

    __slots__ = ("_device", "_dtype", "_held", "_integers", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        is_number = tensor.is_floating_point() or tensor.is_complex()
        self._integers = None if is_number else copied(tensor)
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._held: torch.Tensor | None = None

    def fill(self) -> None:
        """Take the memory."""
        self._held = self._integers
        if self._held is None:
            self._held = torch.empty_strided(
                self._shape, self._stride, dtype=self._dtype, device=self._device
            )

    def tensor(self) -> torch.Tensor:
        """Return it, as a source of a recipe."""
        assert self._held is not None
        return self._held

    def clear(self) -> None:
        """Let go of it."""
        self._held = None


def _likeness(arguments: Iterable[Any]) -> tuple[object, ...]:
    """Return what arguments have in common that are alike: of tensors all but what is in them."""
    return tuple(map(_alike, arguments))


def _alike(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        if type(argument) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{type(argument).__name__} may run anything")
        return argument.shape, argument.stride(), argument.dtype, argument.device
    if isinstance(argument, (list, tuple)):
        return _likeness(argument)
    hash(argument)
    return type(argument), argument
