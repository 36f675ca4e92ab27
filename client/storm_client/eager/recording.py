"""Records what a step has run and saved, and makes the recipes that its plan asks for.

A result is recorded only if it is large and an operation of the table made it. Then it is a value
of the step. If the plan recomputes the value, its recipe is made at once, while the inputs are as
the operation found them.

A step that follows the script of a known plan looks up only the values that are recomputed or
that something is recomputed from. Where the step leaves the script, it looks at everything from
there on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from storm_client.eager.byproducts import Byproduct, byproduct_among
from storm_client.eager.calls import (
    Call,
    HiddenCall,
    is_plain,
    name_of,
    outputs_of,
    tensors_among,
)
from storm_client.eager.casts import Cast, Casts, is_cast
from storm_client.eager.events import CAST, SAVED, Event, LoggedEvent, RecordedValue
from storm_client.eager.followed_plan import Expected
from storm_client.eager.hidden_calls import KnownCall, known_calls
from storm_client.eager.launches import Launch
from storm_client.eager.operation_times import OperationTimes
from storm_client.eager.operations import (
    EXPENSIVE,
    Function,
    is_attention,
    may_overwrite,
    may_view,
    read_by,
)
from storm_client.eager.recipe_maker import RecipeMaker
from storm_client.eager.recognition import StepRecord
from storm_client.eager.recompute import Pins, Result
from storm_client.eager.tracked import TrackedStorage
from storm_client.eager.values import (
    SaveHooks,
    Values,
    is_in_function,
    numbers_of,
)
from storm_client.monitoring.layers import Layers
from storm_client.planner.decisions import OFFLOAD, Decision, Replay
from storm_client.saved.snapshots import base_of, is_result

if TYPE_CHECKING:
    from storm_client.native import _follow

__all__ = ["Recording"]


class SavedValue(NamedTuple):
    """A value that autograd saves, and the decision for it."""

    value: RecordedValue
    decision: Decision
    result: Result | None
    """Set if the value is recomputed."""


class Recording:
    """The record of what one step runs and saves; used in the thread of its block."""

    def __init__(
        self,
        step: StepRecord,
        min_bytes: int,
        hooks: SaveHooks,
        *,
        functions: frozenset[Function],
        layers: Layers,
        times: OperationTimes,
        calls: _follow.CallLog | None = None,
        logs_events: bool = False,
        counts_gradless: bool = False,
    ) -> None:
        """Look at tensors of at least `min_bytes` bytes; `functions` may be recomputed.

        `calls` logs the calls that no Python function reports, and `times` times them. If
        `logs_events`, `calls` also records for compiled code which calls make the values that
        matter. If it `counts_gradless`, results without gradients are values, too.
        """
        self._values = Values(step, min_bytes, layers, counts_gradless=counts_gradless)
        self._recipes = RecipeMaker(step, self._values, hooks, min_bytes=min_bytes)
        self.pack_input = self._recipes.pack_input
        self.min_bytes = min_bytes
        """Minimum size in bytes of the tensors that are looked at."""
        self._hidden = calls
        """Logs the calls that no Python function reports."""
        self._times = times
        self._calls = calls if logs_events else None
        """Records which calls make the values that matter, so that compiled code can follow."""
        self.functions = functions
        self.step = step
        self._casts = Casts()
        self._unlogged: list[int] = []
        """Values that matter to recomputation, and that no single call in the log has made."""
        self._kept: list[torch.Tensor] | None = None
        """Tensors saved since the last function of the table began; None if not needed."""
        self._arguments: Sequence[Any] = ()
        """Of that function, until it returns."""

    @property
    def pins(self) -> Pins:
        """Weak references to the storages that were looked at."""
        return self._values.pins

    @property
    def not_recorded(self) -> AbstractContextManager[None]:
        """A context in which calls are not part of the step: they only serve the recording."""
        return nullcontext() if self._hidden is None else self._hidden

    def expected_keep(self, tensor: torch.Tensor) -> Expected | None:
        """Return the expected event if it is a save of a kept result, and `tensor` can be that.

        The identity of such a value need not be known: any tensor taken for it may be kept.
        """
        expected = self.step.expected
        if self._kept is not None:
            return None  # it may be a byproduct, whose event comes when its function has run
        if not expected.keep_reason or not is_plain(tensor) or not is_result(tensor):
            return None
        nbytes = tensor.untyped_storage().nbytes()
        is_small = tensor.nbytes < self.min_bytes and not tensor._is_view()
        if is_small or not self.min_bytes <= nbytes <= expected.max_bytes:
            return None
        self._note_saved(nbytes)
        return expected

    def logged(self) -> list[LoggedEvent] | None:
        """Return the step's saves and calls; None unless all that matters is known.

        What no single call has made is not recomputed later: Python would have to follow all steps.
        """
        step, calls = self.step, self._calls
        if calls is None or not step.is_as_expected or step.expected.what is not None:
            return None
        if self._unlogged:
            if step.signature is not None:
                step.signature.note_unlogged(self._unlogged)
            return None
        logged = [LoggedEvent(*one) for one in calls.entries()]
        # A script's own operator may be written in Python, so compiled code must not run it.
        used = (one for one in logged if one.is_used_call)
        are_pytorchs = all(one.kernel or one.name.startswith("aten::") for one in used)
        return logged if are_pytorchs else None

    def _note_saved(self, nbytes: int) -> None:
        """Record that the value expected by the script is saved."""
        step = self.step
        if self._calls is not None:
            self._calls.add_save_event(step.count)
        step.record_save(step.expected.value.number, nbytes)
        step.advance()

    def _note_call(self, made: torch.Tensor, tensors: list[torch.Tensor], entry: int = -1) -> None:
        """Record that the function that has just run has made the value expected by the script.

        With an `entry` of the log, the hidden call of that entry has made the value instead.
        """
        calls, expected = self._calls, self.step.expected
        if calls is None:
            return
        if isinstance(expected.what, Byproduct):
            is_logged = calls.assign_byproduct(tensors, self.step.count, entry)
        else:
            is_logged = calls.assign_output(made, tensors, self.step.count, entry)
        if expected.matters and not is_logged:
            self._unlogged.append(expected.value.number)

    def _note_cast(self, cast: Cast, source: torch.Tensor) -> None:
        """Record the same for a cast that autocast has made."""
        calls, address = self._calls, cast.tracked.pin.address
        if calls is not None and not calls.assign_cast(address, [source], self.step.count):
            self._unlogged.append(self.step.expected.value.number)

    def saved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedValue | None:
        """Record that autograd saves `tensor`; return None in a step that is not remembered."""
        step = self.step
        self._note_hidden()
        if self._hidden is not None:
            self._hidden.add_saved_tensor(tensor)
        if self._kept is not None:
            self._kept.append(tensor)
        if step.script is not None:
            found = self._match_save(tensor, storage)
            if found is not None:
                return found
            self._leave_script()
        if step.is_full:
            return None
        tracked = self._values.find(tensor, storage)
        tracked.value.uses += 1
        decision = self._record((SAVED, tracked.number, None, ()), storage.nbytes())
        step.record_save(tracked.number, storage.nbytes())
        decision = OFFLOAD if decision is None else decision
        # If the operation of a value is known, its origin need not be found out.
        is_first = tracked.value.uses == 1 and not tracked.value.operation
        decision = self._expect_operation(tensor, tracked, decision, is_first=is_first)
        step.enter_script()
        return SavedValue(tracked.value, decision, tracked.result)

    def take_byproduct(self, arguments: Sequence[Any], made: Any) -> torch.Tensor | None:
        """Return the byproduct of the function that has just run; None unless exactly one."""
        saved, self._kept = self._kept, None
        return byproduct_among(saved, tensors_among((*arguments, made))) if saved else None

    def _expect_operation(
        self, tensor: torch.Tensor, tracked: TrackedStorage, decision: Decision, *, is_first: bool
    ) -> Decision:
        """Prepare a saved value for the return of the operation that makes it; see `expect`."""
        made = base_of(tensor)
        if is_first and not tracked.value.over:
            self._casts.add(tracked, made)
        return self._recipes.expect(made, tracked, decision, is_first=is_first)

    def begins(self, arguments: Sequence[Any], *, keeps: bool = False) -> None:
        """Note that a function of the table begins; with `keeps` collect the tensors it saves."""
        self._kept = [] if keeps else None
        self._arguments = arguments
        self._casts.begin()
        if self._hidden is not None:
            self._hidden.begin()

    def skips_result(self, function: Function, arguments: Sequence[Any], made: Any) -> bool:
        """Return whether a function's result is no event, or an expected event that needs no work.

        False where that is not known. It is True for most functions of a step that follows its
        script.
        """
        is_opened = self._hidden is not None and self._hidden.end() and is_attention(function)
        self._note_hidden(made)
        self._arguments = ()
        step = self.step
        is_view = may_view(function) and type(made) is torch.Tensor and made._base is not None
        if is_opened or is_view:
            return True
        expected = step.expected
        is_strided = type(made) is torch.Tensor and made.layout is torch.strided
        if step.script is None or not is_strided or expected.what is CAST:
            return False
        is_given = bool(arguments) and made is arguments[0]
        if made.nbytes < self.min_bytes or (is_given and not may_overwrite(function)):
            return True
        if not self._values.counts(made):
            return True
        if expected.matters or not _is_like(expected, function, made):
            return False
        step.advance()
        return True

    def ran(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        made: Any,
        timing: Callable[[], float] | None,
        *,
        draw: _follow.Draw | None,
    ) -> None:
        """Record the result of a function of the table, and the random numbers it has drawn."""
        read, named = read_by(function, arguments, options)
        self._happened(Call(function, read, named, draw), made, timing)

    def launched(self, launch: Launch, timing: Callable[[], float] | None) -> None:
        """Record the results of a kernel launch, as `ran` does for a function.

        The launch may be part of a custom function, whose results join a graph only at its end.
        """
        self.step.has_launches = True
        if self._calls is not None:
            self._calls.launched(launch)
        former = list(map(self.overwritten, launch.tensors[: launch.over]))
        call = Call(launch.kernel, launch.tensors, launch.options, former=former)
        self._happened(call, launch.made, timing)

    def _note_hidden(self, returned: Any = None) -> None:
        """Record the calls that no Python function reports.

        Product kernels copy their arguments by such calls, and tensor subclasses compute by them. A
        copy that a function has `returned` is recorded as the function's own result.
        """
        hidden = () if self._hidden is None else self._hidden.take_hidden()
        for one in map(HiddenCall._make, hidden):
            if self.step.is_full:
                return
            for known in known_calls(one, returned):
                self._happened(known.call, known.made, self._timing(known))

    def _timing(self, known: KnownCall) -> Callable[[], float] | None:
        """Return a function that times a hidden call that has just run, if a time is needed."""
        call, made, is_timed = known
        if not is_timed or self.step.signature is not None or not made.is_cuda:
            return None
        return self._times.of(
            call.function, call.arguments, {}, made, draw=call.draw, casts=call.may_cast
        )

    def overwritten(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Record that a tensor's memory was modified without a version counting it.

        Returns its former value if a launch may have made another value from it, else None.
        """
        if not is_plain(tensor):
            return None
        self.step.has_launches = True
        return self._values.overwritten(tensor)

    def _happened(self, call: Call, made: Any, timing: Callable[[], float] | None) -> None:
        """Advance along the script if it expects the results of a call, else record them."""
        if self.step.script is not None:
            if self._match_results(call, made):
                return
            self._leave_script()
        if self.step.is_full:
            self.end()
        else:
            self._note_made(call, made, timing)

    def _note_made(self, call: Call, made: Any, timing: Callable[[], float] | None) -> None:
        """Record the results of a call as values of the step."""
        step, outputs = self.step, outputs_of(made)
        large = [index for index, output in enumerate(outputs) if self._is_large(output, call)]
        self._look_for_copied_casts(call)
        may_copy = not may_view(call.function) or self._is_inside(call)
        casts = bool(self._casts) and may_copy and not call.is_launch
        self._values.made_inside(call, outputs)
        if not large and step.values:
            # Not `isinstance`: it reads an attribute, which would compute a deferred copy.
            read = [one for one in call.tensors() if issubclass(type(one), torch.nn.Parameter)]
            self._values.reads_parameters(step.values[-1], read)
        if not large and not casts:
            return
        if casts:
            self._explain_casts(self._given(call))
        inputs = self._values.inputs(call) if call.is_fixed() else None
        for index in large:
            output = outputs[index]
            storage = output.untyped_storage()
            found = None if inputs is None else self._values.read_for(call, output, inputs)
            if found is None:
                continue  # an input may change unnoticed, or the output is not new memory
            tracked = self._values.find(output, storage, call.version)
            value = tracked.value
            value.operation = name_of(call.function)
            value.is_expensive = call.function in EXPENSIVE or call.is_launch
            value.is_result |= call.is_launch or is_in_function()
            value.inputs, value.timing = numbers_of(found), timing
            value.over = () if found is inputs else _over(call, output, value.inputs)
            self._values.reads_parameters(value, call.tensors())
            event = (call.function, tracked.number, value.dtype, value.inputs)
            if isinstance(self._record(event, storage.nbytes()), Replay):
                self._recipes.make(
                    tracked, call, found, output, None if outputs[0] is made else index
                )
        step.enter_script()

    def _is_large(self, output: Any, call: Call) -> bool:
        return self._values.is_large(output, in_graph=not (call.is_launch or call.is_byproduct))

    def end(self) -> None:
        """Free everything: nothing runs or is saved any more."""
        self._values.forget()
        if self._hidden is not None:
            self._hidden.take_hidden()  # else the log would hold them as long as the graph lives
        self._casts.clear()
        self._kept, self._arguments = None, ()

    def _explain_casts(self, tensors: list[torch.Tensor]) -> None:
        """Record for casts saved while a function ran which of its arguments they copy."""
        for cast in self._casts.take():
            source = cast.source_among(tensors)
            inputs = None if source is None else self._values.inputs_among([source])
            if source is None or inputs is None:
                continue
            tracked = cast.tracked
            value = tracked.value
            value.operation, value.inputs = name_of(torch.Tensor.to), numbers_of(inputs)
            value.is_cached = cast.is_cached(source)
            event = (CAST, tracked.number, cast.made.dtype, value.inputs)
            if isinstance(self._record(event, value.nbytes), Replay):
                self._recipes.make_cast(cast, source, inputs)

    def _is_inside(self, call: Call) -> bool:
        """Return whether a call is hidden inside a function of the table."""
        return call.hidden is not None and bool(self._arguments)

    def _given(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors of which autocast may have made what a call reads."""
        return tensors_among(self._arguments) if self._is_inside(call) else call.tensors()

    def _copied_casts(self, call: Call) -> list[torch.Tensor]:
        """Return the tensors that a hidden call reads and that may be casts by autocast."""
        if not self._is_inside(call):
            return []
        large = [one for one in call.tensors() if is_plain(one) and one.nbytes >= self.min_bytes]
        return [one for one in large if is_cast(base_of(one))]

    def _look_for_copied_casts(self, call: Call) -> None:
        """Note the unknown casts that a hidden call reads: autograd saves their copies instead."""
        for tensor in self._copied_casts(call):
            tracked = self._values.find(tensor, tensor.untyped_storage())
            if not (tracked.value.operation or tracked.value.is_saved):
                self._casts.add(tracked, base_of(tensor))

    # --- along a script ---------------------------------------------------------------------

    def _match_save(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedValue | None:
        """Return a saved tensor's value and decision if the script expects it, else None."""
        expected = self.step.expected
        if expected.what is not SAVED:
            return None
        nbytes, result = storage.nbytes(), None
        decision = expected.decision_for(nbytes)
        if expected.matters:
            tracked = self._values.look_up(expected, tensor, storage)
            if tracked is None:
                return None
            decision = self._expect_operation(tensor, tracked, decision, is_first=expected.is_new)
            result = tracked.result
        self._note_saved(nbytes)
        return SavedValue(expected.value, decision, result)

    def _match_results(self, call: Call, made: Any) -> bool:
        """Return whether the script expects the results of a call; advance past them."""
        step = self.step
        while step.expected.what is CAST:
            if step.expected.matters and not self._match_cast(step.expected, call):
                return False
            step.advance()
        outputs = outputs_of(made)
        for index, output in enumerate(outputs):
            if not self._is_large(output, call):
                continue
            expected = step.expected
            if not _is_like(expected, call.function, output) or self._overwrites_unexpected(
                call, output
            ):
                if self._is_recomputable(output, call):
                    return False
                continue
            place = None if outputs[0] is made else index
            if expected.matters and not self._match_output(expected, call, output, place):
                return False
            if expected.matters:
                self._note_call(output, call.tensors(), call.entry)
            step.advance()
        return True

    def _match_output(
        self, expected: Expected, call: Call, output: torch.Tensor, index: int | None
    ) -> bool:
        """Return whether an output can be the expected value; if so, carry out its decision."""
        storage = output.untyped_storage()
        if not isinstance(expected.decision, Replay):
            return self._values.look_up(expected, output, storage, call.version) is not None
        inputs = self._values.match_inputs(call, output, expected.inputs)
        if inputs is None or not call.is_fixed():
            return False
        tracked = self._values.look_up(expected, output, storage, call.version)
        if tracked is None:
            return False
        self._recipes.make(tracked, call, inputs, output, index)
        return True

    def _overwrites_unexpected(self, call: Call, output: torch.Tensor) -> bool:
        """Return whether a call has overwritten other values than the script expects.

        If a former value is unknown, the call was no event when the script was learned.
        """
        expected = self.step.expected
        if not isinstance(expected.decision, Replay):
            return False
        former, over = self._values.former(call, output), expected.value.over
        return any(before is None or before.number not in over for before in former)

    def _match_cast(self, expected: Expected, call: Call) -> bool:
        """Return whether autocast has made the value that the script expects."""
        for tensor in self._copied_casts(call) if expected.is_new else ():
            tracked = self._values.look_up(expected, tensor, tensor.untyped_storage())
            if tracked is not None:
                self._casts.add(tracked, base_of(tensor))
                break  # a call's next unknown cast is that of the next event
        for cast in self._casts:
            if cast.tracked.number == expected.value.number:
                source = cast.source_among(self._given(call))
                if source is None or not self._values.is_sound(source):
                    return False
                if isinstance(expected.decision, Replay):
                    inputs = self._values.match_tensors([source], expected.inputs)
                    if inputs is None:
                        return False
                    self._recipes.make_cast(cast, source, inputs)
                self._note_cast(cast, source)
                return True
        return False

    def _is_recomputable(self, output: torch.Tensor, call: Call) -> bool:
        """Return whether an output of a call is recomputable: new memory made from sound inputs."""
        former = self._values.former(call, output)
        is_sound = call.is_fixed() and all(map(self._values.is_sound, call.tensors()))
        are_made = all(before is not None and before.value.operation for before in former)
        is_new = not (call.takes(output.untyped_storage()) or call.brings(output))
        return is_sound and are_made and is_new

    def _record(self, event: Event, nbytes: int) -> Decision | None:
        """Record an event as `StepRecord.record_event` does."""
        signature = self.step.signature
        decision = self.step.record_event(event, nbytes)
        if self.step.signature is not signature:
            self._values.hold_results()
        return decision

    def _leave_script(self) -> None:
        """Leave the script: look at everything from here on."""
        self.step.leave_script()
        self._values.leave_script()
        self._values.hold_results()


def _is_like(expected: Expected, function: Function, output: torch.Tensor) -> bool:
    """Return whether a function's output can be the value that a script expects."""
    value = expected.value
    return expected.what is function and value.dtype is output.dtype


def _over(call: Call, output: torch.Tensor, inputs: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the values that a call has overwritten, first the output's former."""
    over = inputs[: len(call.former) or 1]
    own = [n for n, one in zip(over, call.tensors(), strict=False) if one is output]
    return tuple(dict.fromkeys((*own, *over)))
