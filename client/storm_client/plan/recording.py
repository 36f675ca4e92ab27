"""Watches what a step runs, and makes the recipes that its plan asks for.

While a block with a plan to learn or with something to replay runs, each of PyTorch's functions
passes through a Recorder. It costs the host some microseconds a call, so a plan without replays
runs without. What an operation has just made is looked at only if it is large and an operation of
the table made it: then it is a value of the step, and if the plan wants it made again, its recipe
is made at once, while the inputs are as the operation found them.

Storages are told apart by the address of their implementation, which a weak reference keeps from
being used again until the block ends.

A step that walks along the script of a known plan looks up only the values that something is made
again from. Where it leaves the script everything is looked at from there on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from storm_client.blocks import untraced
from storm_client.layers import Layers
from storm_client.plan.decisions import OFFLOAD, Decision, Replay
from storm_client.plan.kinds import CAST, SAVED, Expected, StepRecord, Value
from storm_client.plan.operations import DEAR, Function
from storm_client.plan.recipes import (
    Alias,
    Ends,
    Made,
    Recipe,
    Result,
    Saved,
    Source,
    UnchangedTrial,
    checksum,
)
from storm_client.saved import Ready, SnapshotProof, View, WeakStorage, base_of, is_result

__all__ = ["Mark", "Recorder", "Recording", "Seen", "Span", "mark"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Mark: TypeAlias = float | torch.cuda.Event
"""A moment, on the host or on a stream."""

_CAST = "ToCopyBackward0"
"""The name of a cast's node in the graph."""

_CONSTANT = -1
"""Stands for an input that stays: a parameter, or something small."""

_UNKNOWN = -1
"""The number of a value that was not looked at."""


class Seen:
    """A storage of the step at hand, at one version."""

    __slots__ = ("number", "result", "value", "version")

    def __init__(self, value: Value, version: int) -> None:
        """It is `value` of the step as long as it has this version."""
        self.value = value
        self.number = value.number
        self.version = version
        self.result: Result | None = None


class _Cast(NamedTuple):
    """A tensor that autocast has made of an argument: no function of PyTorch's returns it."""

    seen: Seen
    node: object
    """The argument's, in the graph."""
    dtype: torch.dtype

    def source_among(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the argument that it is a copy of."""
        return next((tensor for tensor in tensors if _is_node_of(self.node, tensor)), None)


class _Call:
    """A function that has been run on its arguments."""

    __slots__ = ("_tensors", "arguments", "function", "options", "recipe")

    def __init__(
        self, function: Function, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.options = options
        self.recipe: Recipe | None = None
        """Of all its results, once one of them is to be made again."""
        self._tensors: list[torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among its arguments."""
        if self._tensors is None:
            self._tensors = list(_tensors(self.arguments))
            if self.options:
                self._tensors += _tensors(self.options.values())
        return self._tensors


class Recording:
    """The values of one step, by storage; in the thread of its block."""

    def __init__(
        self,
        step: StepRecord,
        least: int,
        *,
        pack: Callable[[torch.Tensor, int], Any],
        unpack: Callable[[Any], torch.Tensor],
        publish: Callable[[torch.Tensor], int] | None,
        functions: frozenset[Function],
        ends: Ends,
        layers: Layers,
    ) -> None:
        """Look at what has `least` bytes; inputs are handed over by `pack`.

        `publish` returns a number that tells when a tensor has been made, 0 where nobody asks for
        that. `functions` may be run again, `ends` watches results.
        """
        self._layers = layers
        self.functions = functions
        self._ends = ends
        self.step = step
        self.pins: deque[WeakStorage] = deque()
        """What has to be freed when the block has ended."""
        self._least = least
        self._pack = pack
        self._unpack = unpack
        self._publish = publish
        self._ready: dict[int, Ready] = {}
        """By storage, what leaves as it was made."""
        self.tries = False
        """Whether it is being found out what does so."""
        self._seen: dict[int, Seen] = {}
        self._casts: list[_Cast] = []
        """What was saved since the last function of the table began."""

    def saved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[Seen, Decision]:
        """Note that autograd saves `tensor`; return its value and what is to become of it."""
        step = self.step
        if step.script is not None:
            found = self._walks_by(tensor, storage)
            if found is not None:
                return found
            self._leave_script()
        seen = self._find(tensor, storage)
        seen.value.uses += 1
        decision = step.happened((SAVED, seen.number, seen.value.nbytes, None, ()), seen.number)
        decision = OFFLOAD if decision is None else decision
        self._expect_operation(tensor, seen, decision, is_first=seen.value.uses == 1)
        step.walk_on()
        return seen, decision

    def _expect_operation(
        self, tensor: torch.Tensor, seen: Seen, decision: Decision, *, is_first: bool
    ) -> None:
        """Note of a saved value what has to be known when its operation returns."""
        made = base_of(tensor)
        if isinstance(decision, Replay) and seen.result is None:
            seen.result = Result(made, seen.value.nbytes, self._ends)
        if is_first and made.grad_fn is not None and made.grad_fn.name() == _CAST:
            self._casts.append(_Cast(seen, made.grad_fn.next_functions[0][0], made.dtype))

    def ready(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Ready | None:
        """Return from when on the bytes of a saved tensor are there, if that is known."""
        found = self._ready.get(storage._cdata)
        return found if found is not None and found.holds_for(tensor) else None

    def begins(self) -> None:
        """Note that a function of the table begins."""
        self._casts.clear()

    def ran(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        made: Any,
        timing: Callable[[], float] | None,
    ) -> None:
        """Note what a function of the table has made of its arguments."""
        step, call = self.step, _Call(function, arguments, options)
        if step.script is not None:
            if self._walks_past(call, made):
                return
            self._leave_script()
        if step.is_full:
            self.end()
            return
        outputs = _outputs(made)
        large = [index for index, output in enumerate(outputs) if self._is_large(output)]
        if not large and not self._casts:
            return
        tensors = call.tensors()
        self._explain_casts(tensors)
        storages = _addresses(tensors)
        inputs = self._inputs(tensors)
        for index in large:
            output = outputs[index]
            storage = output.untyped_storage()
            if inputs is None or storage._cdata in storages:
                continue  # what it reads may change unnoticed; or it has made no memory of its own
            seen = self._find(output, storage)
            value = seen.value
            value.operation = _name(function)
            value.is_dear = function in DEAR
            value.inputs, value.timing = inputs, timing
            event = (function, seen.number, value.nbytes, value.dtype, inputs)
            if isinstance(step.happened(event, seen.number), Replay):
                self._give_up(seen, call, output, None if outputs[0] is made else index)
        step.walk_on()

    def end(self) -> None:
        """Let go of everything: nothing runs or is saved any more."""
        self._seen.clear()
        self._ready.clear()
        self._casts.clear()
        while self.pins:
            self.pins.pop().free()

    def _give_up(self, seen: Seen, call: _Call, output: torch.Tensor, index: int | None) -> None:
        """Have a value be made again: it is what `call` made, or of several results one."""
        if call.recipe is None:
            call.recipe = self._recipe(call, output.device.type)
        if seen.result is None:
            seen.result = Result(output, seen.value.nbytes, self._ends)
        seen.result.made_by(call.recipe, index)

    def _explain_casts(self, tensors: list[torch.Tensor]) -> None:
        """Note of what was saved while a function ran which of its arguments it is a copy of."""
        casts, self._casts = self._casts, []
        for cast in casts:
            source = cast.source_among(tensors)
            inputs = None if source is None else self._inputs([source])
            if source is None or inputs is None:
                continue
            seen = cast.seen
            value = seen.value
            value.operation, value.inputs = _name(torch.Tensor.to), inputs
            event = (CAST, seen.number, value.nbytes, cast.dtype, inputs)
            if isinstance(self.step.happened(event, seen.number), Replay):
                self._cast_again(cast, source)

    def _cast_again(self, cast: _Cast, source: torch.Tensor) -> None:
        if cast.seen.result is not None:
            call = _Call(torch.Tensor.to, (source, cast.dtype), {})
            cast.seen.result.made_by(self._recipe(call, source.device.type), None)

    # --- along a script ---------------------------------------------------------------------

    def _walks_by(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> tuple[Seen, Decision] | None:
        """Return what becomes of a saved tensor if the script expects it; None if it does not."""
        expected = self.step.expected()
        if expected is None or expected.what is not SAVED:
            return None
        if expected.value.nbytes != storage.nbytes():
            return None
        if expected.matters:
            seen = self._look_up(expected, tensor, storage)
            if seen is None:
                return None
            self._expect_operation(tensor, seen, expected.decision, is_first=expected.is_new)
        else:
            seen = Seen(expected.value, tensor._version)
        self.step.advance()
        return seen, expected.decision

    def _walks_past(self, call: _Call, made: Any) -> bool:
        """Tell whether what a call has made is what the script expects."""
        step = self.step
        while (expected := step.expected()) is not None and expected.what is CAST:
            if expected.matters and not self._walks_by_cast(expected, call):
                return False
            step.advance()
        outputs = _outputs(made)
        for index, output in enumerate(outputs):
            if not self._is_large(output):
                continue
            expected, storage = step.expected(), output.untyped_storage()
            if expected is None or not _is_like(expected, call, output, storage):
                if self._could_make_again(storage, call):
                    return False
                continue
            place = None if outputs[0] is made else index
            if expected.matters and not self._walks_by_made(expected, call, output, place):
                return False
            if expected.leaves:
                self._note_made(expected.value.number, output, storage)
            step.advance()
        return True

    def _note_made(self, number: int, output: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Note from when on the bytes of a value that will leave are there.

        That may be read before it leaves. It is, once a step has shown that it is not written to
        until then, uncounted.
        """
        kind = self.step.kind
        if kind is None or self._publish is None or number in kind.changed:
            return
        sequence = self._publish(output)
        if not sequence:
            return
        proof, trial = SnapshotProof(output), None
        if number not in kind.unchanged:
            self.tries, sequence = True, 0
            trial = UnchangedTrial(kind, number, checksum(storage))
        self.pins.append(WeakStorage(storage))
        self._ready[storage._cdata] = Ready(proof, sequence, trial)

    def _walks_by_made(
        self, expected: Expected, call: _Call, output: torch.Tensor, index: int | None
    ) -> bool:
        """Tell whether an output can be what the script expects, and do what becomes of that."""
        storage = output.untyped_storage()
        is_replay = isinstance(expected.decision, Replay)
        if is_replay and not (
            self._could_make_again(storage, call) and self._meet(call.tensors(), expected.inputs)
        ):
            return False
        seen = self._look_up(expected, output, storage)
        if seen is not None and is_replay:
            self._give_up(seen, call, output, index)
        return seen is not None

    def _walks_by_cast(self, expected: Expected, call: _Call) -> bool:
        """Tell whether autocast has made the value that the script expects."""
        for cast in self._casts:
            if cast.seen.number == expected.value.number:
                source = cast.source_among(call.tensors())
                if source is None or not self._is_sound(source):
                    return False
                if isinstance(expected.decision, Replay):
                    if not self._meet([source], expected.inputs):
                        return False
                    self._cast_again(cast, source)
                return True
        return False

    def _meet(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> bool:
        """Tell whether inputs of a recipe can be the expected values, and note which they are."""
        if len(tensors) != len(numbers):
            return False
        values = self.step.kind.values if self.step.kind is not None else []
        for tensor, number in zip(tensors, numbers, strict=True):
            if self._is_constant(tensor) is not (number == _CONSTANT):
                return False
            if number == _CONSTANT:
                continue
            storage, version = tensor.untyped_storage(), tensor._version
            seen = self._seen.get(storage._cdata)
            if seen is None:
                self.pins.append(WeakStorage(storage))
            elif seen.version == version:
                if seen.number != number:
                    return False
                continue
            self._seen[storage._cdata] = Seen(values[number], version)
        return True

    def _could_make_again(self, storage: torch.UntypedStorage, call: _Call) -> bool:
        """Tell whether a call has made memory of its own, of what changes are counted of."""
        tensors = call.tensors()
        return all(map(self._is_sound, tensors)) and storage._cdata not in _addresses(tensors)

    def _look_up(
        self, expected: Expected, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> Seen | None:
        """Return the value that the script expects if a storage has it now."""
        address, version = storage._cdata, tensor._version
        seen = self._seen.get(address)
        if seen is not None and seen.version == version:
            is_same = not expected.is_new and seen.number == expected.value.number
            return seen if is_same else None
        if not expected.is_new:
            return None
        if seen is None:
            self.pins.append(WeakStorage(storage))
        seen = self._seen[address] = Seen(expected.value, version)
        return seen

    def _leave_script(self) -> None:
        """Go on by looking at everything: the step has left its script."""
        self.step.leave_script()
        values = self.step.values
        # What an operation that the script did not expect was made from may have no event yet.
        self._seen = {at: seen for at, seen in self._seen.items() if seen.number < len(values)}
        for seen in self._seen.values():
            seen.value = values[seen.number]

    # --- values -----------------------------------------------------------------------------

    def _is_large(self, output: Any) -> bool:
        return (
            type(output) is torch.Tensor
            and output.requires_grad
            and output.layout is torch.strided
            and output.nbytes >= self._least
        )

    def _find(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Seen:
        """Return the value that a storage has now, a new one if it is not known."""
        address, version = storage._cdata, tensor._version
        seen = self._seen.get(address)
        if seen is not None and seen.version == version:
            return seen
        if seen is None:
            self.pins.append(WeakStorage(storage))
        number = len(self.step.values)
        value = Value(
            number=number,
            nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            shape=tensor.shape,
            is_on_gpu=tensor.is_cuda,
            is_result=is_result(tensor),
            layer=self._layer(number),
        )
        seen = self._seen[address] = Seen(self.step.add(value), version)
        return seen

    def _layer(self, number: int) -> str:
        """Return where a value is made or saved; where the step is like a known one, as there."""
        kind = self.step.kind
        if kind is not None and number < len(kind.values):
            return kind.values[number].layer
        return self._layers.current()

    def _inputs(self, tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
        """Return the numbers of the inputs; None where one could change without being counted."""
        numbers = []
        for tensor in tensors:
            if not self._is_sound(tensor):
                return None
            if self._is_constant(tensor):
                numbers.append(_CONSTANT)
            else:
                numbers.append(self._find(tensor, tensor.untyped_storage()).number)
        return tuple(numbers)

    def _is_sound(self, tensor: torch.Tensor) -> bool:
        """Tell whether a recipe may rest on a tensor: its changes are counted, or it is copied."""
        return _is_plain(tensor) and (self._is_constant(tensor) or is_result(tensor))

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage().nbytes() < self._least:
            return True
        base = tensor._base if tensor._is_view() else tensor
        return isinstance(base, torch.nn.Parameter)

    def _recipe(self, call: _Call, device: str) -> Recipe:
        return Recipe(
            call.function,
            [self._held(argument) for argument in call.arguments],
            {name: self._held(value) for name, value in call.options.items()},
            device,
        )

    def _held(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self._source(argument)
        if type(argument) in (list, tuple):
            return type(argument)(map(self._held, argument))
        return argument

    def _source(self, tensor: torch.Tensor) -> Source:
        if self._is_constant(tensor):
            is_small = tensor.untyped_storage().nbytes() < self._least
            # What no operation made can be written to without being counted.
            return Alias.of(
                tensor.detach().clone() if is_small and not is_result(tensor) else tensor
            )
        seen = self._known(tensor)
        if seen is not None and seen.result is not None:
            seen.result.expect_use()
            return Made(seen.result, View.of(tensor))
        return Saved(self._pack(tensor, _UNKNOWN if seen is None else seen.number), self._unpack)

    def _known(self, tensor: torch.Tensor) -> Seen | None:
        """Return a tensor's value; None for one that a script passed over."""
        storage = tensor.untyped_storage()
        if self.step.script is None:
            return self._find(tensor, storage)
        seen = self._seen.get(storage._cdata)
        return seen if seen is not None and seen.version == tensor._version else None


class Recorder(TorchFunctionMode):
    """Hands what functions of the table make to a Recording."""

    def __init__(self, recording: Recording, *, measures: bool) -> None:
        """Report to `recording`; how long each takes on a GPU is measured if `measures`.

        On a CPU it is not: what else runs there decides that.
        """
        super().__init__()
        self._recording: Recording | None = recording
        self._measures = measures

    def end(self) -> None:
        """Pass everything through from now on."""
        self._recording = None

    @untraced
    def __torch_function__(
        self,
        function: Function,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `function` and note what it made."""
        recording = self._recording
        options = kwargs or {}
        if recording is None or function not in recording.functions:
            return function(*args, **options)
        recording.begins()
        if not (self._measures and _is_on_gpu(args)):
            made = function(*args, **options)
            recording.ran(function, args, options, made, None)
            return made
        begin = mark(is_on_gpu=True)
        made = function(*args, **options)
        recording.ran(function, args, options, made, Span(begin, mark(is_on_gpu=True)))
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
        if isinstance(self._end, float):
            return True
        return bool(self._end.query())  # type: ignore[no-untyped-call]

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


def _outputs(made: Any) -> Sequence[Any]:
    return made if type(made) in (tuple, list) else (made,)


def _is_like(
    expected: Expected, call: _Call, output: torch.Tensor, storage: torch.UntypedStorage
) -> bool:
    """Tell whether what a call has made can be the value that a script expects."""
    value = expected.value
    return (
        expected.what is call.function
        and value.nbytes == storage.nbytes()
        and value.dtype is output.dtype
    )


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor)}


def _is_on_gpu(arguments: Sequence[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[0], torch.Tensor) and arguments[0].is_cuda


def _tensors(arguments: Iterable[Any]) -> Iterable[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif type(argument) in (list, tuple):
            yield from _tensors(argument)


def _name(function: Function) -> str:
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    name = getattr(function, "_qualified_op_name", None) or getattr(function, "__name__", None)
    return str(name or function)


def _is_node_of(node: object, tensor: torch.Tensor) -> bool:
    """Tell whether a gradient for `tensor` goes to `node`."""
    if tensor.grad_fn is None:
        return getattr(node, "variable", None) is tensor
    return tensor.grad_fn is node


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
