"""Watches PyTorch's functions while a block runs, and times them.

In a block whose signature is being learned, or whose plan recomputes something, each of PyTorch's
functions passes through a Recorder. That costs the host some microseconds per call, so a step whose
plan recomputes nothing has no Recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from storm_client.devices import is_capturing
from storm_client.eager.byproducts import FORMER, Byproduct
from storm_client.eager.calls import tensors_among
from storm_client.eager.function_modes import Watching, are_altered, looked_into
from storm_client.eager.launches import Launch
from storm_client.eager.marks import Mark
from storm_client.eager.operation_times import OperationTimes
from storm_client.eager.operations import Function, byproduct_of, draws, is_bound
from storm_client.eager.recording import Recording
from storm_client.hook_stack import function_modes, untraced

if TYPE_CHECKING:
    from storm_client.native import _follow

__all__ = ["NoteDraw", "Recorder"]

NoteDraw: TypeAlias = "Callable[[torch.Tensor], _follow.Draw | None]"

_len_dispatch_stack = torch._C._len_torch_dispatch_stack


class Recorder(Watching):
    """Passes the results of functions of the table to a Recording."""

    def __init__(
        self,
        recording: Recording,
        operations: OperationTimes,
        *,
        measures: bool,
        note_draw: NoteDraw | None = None,
    ) -> None:
        """Report to `recording`; if it `measures`, put events around operations on a GPU.

        `note_draw` records the random numbers drawn next on a tensor's device, and returns None
        where it cannot. Without it operations that draw are not reported.

        `operations` has the times of operations in earlier steps. Operations on a CPU are not
        timed, since their time depends on what else runs there.
        """
        super().__init__()
        self._recording: Recording | None = None if are_altered() else recording
        self._measures = measures
        self._operations = operations
        self._note_draw = note_draw

    def end(self) -> None:
        """Pass all functions through from now on."""
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
        """Run `function` and record its result, unless a mode of the script may have altered it."""
        recording = self._recording
        if recording is None or _is_elsewhere(args):
            return function(*args, **kwargs) if kwargs else function(*args)
        if function in recording.functions and is_bound(function, args, kwargs or {}):
            return self._watched(recording, function, args, kwargs)
        are_plain = all(one is torch.Tensor for one in types)
        inside = looked_into(function) if are_plain else None
        if inside is not None:
            return self.call_inside(inside, *args, **kwargs or {})
        return function(*args, **kwargs) if kwargs else function(*args)

    def _watched(
        self,
        recording: Recording,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Run a function of the table and record its result."""
        draw: _follow.Draw | None = None
        if draws(function, args, kwargs or {}):
            draw = self._noted_draw(args, kwargs or {})
            if draw is None:
                return function(*args, **kwargs) if kwargs else function(*args)
        byproduct = byproduct_of(function)
        recording.begins((*args, *(kwargs or {}).values()), keeps=byproduct is not None)
        begin = Mark(args[0].device) if self._measures and _is_on_gpu(args) else None
        made = function(*args, **kwargs) if kwargs else function(*args)
        if draw is not None:
            draw.end()
        with recording.not_recorded:
            if not recording.skips_result(function, args, made):
                timing: Callable[[], float] | None = None
                if begin is not None or (recording.step.signature is None and _is_on_gpu(args)):
                    span = None if begin is None else begin.until_now()
                    operations, options = self._operations, kwargs or {}
                    timing = operations.of(function, args, options, made, span, draw=draw)
                recording.ran(function, args, kwargs or {}, made, timing, draw=draw)
            if byproduct is not None:
                self._note_byproduct(byproduct, args, kwargs or {}, made, draw)
        return made

    def _note_byproduct(
        self,
        byproduct: Byproduct,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        made: Any,
        draw: _follow.Draw | None,
    ) -> None:
        """Record the byproduct of a call, if it is one tensor."""
        recording = self._recording
        kept = None if recording is None else recording.take_byproduct(arguments, made)
        if recording is None or kept is None or not arguments:
            return
        if byproduct is FORMER:
            if made is arguments[0] and not made._is_view():
                recording.ran(FORMER, arguments[:1], {}, kept, None, draw=None)
            return
        if made is arguments[0]:
            return  # the call has overwritten its input
        if isinstance(made, torch.Tensor) and made.nbytes < recording.min_bytes:
            return  # compiled code does not see calls with small results
        timing: Callable[[], float] | None = None
        if recording.step.signature is None and kept.is_cuda:
            timing = self._operations.of(byproduct, arguments, options, kept, draw=draw)
        recording.ran(byproduct, arguments, options, kept, timing, draw=draw)

    def launched(self, *fields: Any) -> None:
        """Record the results of a kernel launch, unless it is part of another function's call."""
        recording, launch = self._recording, Launch(*fields)
        if recording is None:
            return
        if self._is_watching() and not _is_captured(launch.made):
            with torch._C.DisableTorchFunction():  # the recording is not part of the step
                self._launched(recording, launch)
            return
        for tensor in launch.tensors[: launch.over]:
            self.overwritten(tensor)

    def _launched(self, recording: Recording, launch: Launch) -> None:
        timing: Callable[[], float] | None = None
        if recording.step.signature is None and launch.made[0].is_cuda:
            call = launch.kernel, launch.tensors, launch.options, launch.made
            timing = self._operations.of(*call)
        recording.launched(launch, timing)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Record that a launch has written to memory that may have been in use."""
        if self._recording is not None:
            with torch._C.DisableTorchFunction():
                self._recording.overwritten(tensor)

    def _is_watching(self) -> bool:
        """Return whether a function called now would pass through this mode and is not altered."""
        return not _is_intercepted() and any(mode is self for mode in function_modes())

    def _noted_draw(
        self, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> _follow.Draw | None:
        """Return the record of a call's random numbers; None where they cannot be recorded.

        Only compiled code can exchange a generator's state without another thread drawing between.
        """
        tensors = tensors_among((*arguments, *options.values()))
        return self._note_draw(tensors[0]) if self._note_draw is not None and tensors else None


def _is_elsewhere(arguments: Sequence[Any]) -> bool:
    """Return whether a call made now may be altered, or is captured for later instead of run."""
    return _is_intercepted() or _is_captured(arguments)


def _is_intercepted() -> bool:
    """Return whether calls are intercepted below functions, and so may be altered or recorded.

    That is so with dispatch modes, while tracing, and in `vmap`, `jvp` and similar transforms,
    whose tensors have no memory.
    """
    return bool(
        _len_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
    )


def _is_captured(tensors: Sequence[Any]) -> bool:
    """Return whether calls on these tensors are captured into a CUDA graph, which runs later."""
    return _is_on_gpu(tensors) and is_capturing(tensors[0].device)


def _is_on_gpu(arguments: Sequence[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[0], torch.Tensor) and arguments[0].is_cuda
