"""What a step has run and saved, and the recipes that its plan asks for.

What an operation has just made is looked at only if it is large and an operation of
the table made it: then it is a value of the step, and if the plan wants it recomputed, its recipe
is made at once, while the inputs are as the operation found them.

Storages are told apart by the address of their implementation, which a weak reference keeps from
being used again until the block ends.

A step that walks along the script of a known plan looks up only the values that something is made
again from. Where it leaves the script everything is looked at from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from storm_client.eager.following import Noted
from storm_client.eager.operations import EXPENSIVE, Function
from storm_client.eager.recompute import (
    Alias,
    Input,
    Made,
    Pins,
    Recipe,
    Result,
    Saved,
    Source,
    UnchangedTrial,
    checksum,
    copied,
)
from storm_client.eager.signature import CAST, SAVED, Expected, RecordedValue, StepRecord
from storm_client.monitoring.layers import Layers
from storm_client.planner.decisions import OFFLOAD, Decision, Replay
from storm_client.saved.ranges import WeakStorage
from storm_client.saved.snapshots import Ready, SnapshotProof, base_of, is_result
from storm_client.saved.versions import SavedVersion, View

if TYPE_CHECKING:
    from storm_client.native import _follow

__all__ = ["Recording"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_CAST = "ToCopyBackward0"
"""The name of a cast's node in the graph."""

_VERSION = "storm_client: version of what was cast"
"""Among a node's metadata."""

_next_number = torch._C._autograd._get_sequence_nr

_CONSTANT = -1
"""Stands for an input that stays: a parameter, or something small."""

ALIGNMENT_BYTES = 64
"""At a multiple of which PyTorch's own memory begins, on a GPU of more. What lies otherwise, as
NumPy's may, has its first elements added by themselves."""

LARGE_BYTES = 16 << 20
"""What leaves as it was made has as many. A smaller one is on the link for less than the device
takes for what comes before it would leave anyway, and noting it costs the training thread."""


class _Seen:
    """A storage of the step at hand, at one version."""

    __slots__ = ("number", "pin", "result", "value", "version")

    def __init__(self, value: RecordedValue, version: int, pin: WeakStorage) -> None:
        """It is `value` of the step as long as it has this version; `pin` knows the storage."""
        self.value = value
        self.number = value.number
        self.version = version
        self.pin = pin
        self.result: Result | None = None


_Inputs: TypeAlias = list[_Seen | None]
"""What the tensors among a call's arguments are, None for what stays."""


class SavedValue(NamedTuple):
    """What autograd saves."""

    value: RecordedValue
    decision: Decision
    result: Result | None
    """Set for one that is recomputed."""


class _Cast(NamedTuple):
    """A tensor that autocast has made of an argument: no function of PyTorch's returns it."""

    seen: _Seen
    node: Any
    """Its own, in the graph."""
    is_new: bool
    """Whether it was made by the function that runs, rather than kept by autocast."""
    dtype: torch.dtype

    def source_among(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
        """Return the argument that it is a copy of, unless that may be another by now.

        Autocast keeps casts of parameters as long as it is on, also of those that are written to.
        """
        node = self.node.next_functions[0][0]
        source = next((tensor for tensor in tensors if _is_node_of(node, tensor)), None)
        if source is None:
            return None
        if self.is_new:
            self.node.metadata[_VERSION] = source._version
        return source if self.node.metadata.get(_VERSION) == source._version else None


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
        """Of all its results, once one of them is to be recomputed."""
        self._tensors: list[torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among its arguments."""
        if self._tensors is None:
            self._tensors = _tensors(self.arguments)
            if self.options:
                self._tensors += _tensors(self.options.values())
        return self._tensors

    def is_fixed(self) -> bool:
        """Tell whether all of its arguments that are no tensors are values, which never change."""
        return _are_values(self.arguments) and _are_values(self.options.values())

    def recipe_of(self, sources: list[Source], device: str) -> Recipe:
        """Return how to run it again, with `sources` for its tensors."""
        left = iter(sources)
        arguments = [_replaced(argument, left) for argument in self.arguments]
        options = {name: _replaced(value, left) for name, value in self.options.items()}
        return Recipe(self.function, arguments, options, device)


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
        is_ready: Callable[[torch.Tensor, Ready], None],
        functions: frozenset[Function],
        layers: Layers,
        calls: _follow.CallLog | None = None,
    ) -> None:
        """Look at what has `least` bytes; inputs are handed over by `pack`.

        `publish` returns a number that tells when a tensor has been made, 0 where nobody asks for
        that, and `is_ready` hears of what will leave by that. `functions` may be recomputed.
        """
        self._layers = layers
        self._calls = calls
        """Notes which calls make what matters, for compiled code to follow the next steps."""
        self.functions = functions
        self.step = step
        self.pins = Pins()
        """Of all storages that were looked at; results hold it, too."""
        self._least = least
        self.pack_input = pack
        self._unpack = unpack
        self._publish = publish
        self._is_ready = is_ready
        self.ready: dict[int, Ready] = {}
        """By the storage's address, what leaves as it was made."""
        self.tries = False
        """Whether it is being found out what does so."""
        self._seen: dict[int, _Seen] = {}
        self._casts: list[_Cast] = []
        """What was saved since the last function of the table began."""
        self._first_number = _next_number()
        """Of the nodes that are made from then on."""

    def staying(self, tensor: torch.Tensor) -> Expected | None:
        """Return what the script expects if that is a saved result that stays, and `tensor` is it.

        No more has to be known of one: whatever is taken for it may stay.
        """
        expected = self.step.expected
        if not expected.stays or not _is_plain(tensor) or not is_result(tensor):
            return None
        if tensor.untyped_storage().nbytes() != expected.value.nbytes:
            return None
        self._note_saved()
        self.step.advance()
        return expected

    def noted(self) -> list[Noted] | None:
        """Return what the step has saved and called; None unless all that matters is known."""
        step, calls = self.step, self._calls
        if calls is None or step.script is None or step.expected.what is not None:
            return None
        noted = [Noted(*one) for one in calls.entries()]
        # An operator of the script's own may be written in Python, which Python is to run.
        are_pytorchs = all(one.name.startswith("aten::") for one in noted if one.is_used_call)
        return noted if are_pytorchs else None

    def _note_saved(self) -> None:
        if self._calls is not None:
            self._calls.saved(self.step.count)

    def _note_call(self, made: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        """Note that the function that has run has made what the script expects."""
        calls = self._calls
        if calls is not None and not calls.made(made, tensors, self.step.count):
            self._calls = None  # by several calls: only Python can do that again

    def _note_cast(self, cast: _Cast, source: torch.Tensor) -> None:
        """The same of a cast that autocast has made."""
        calls, address = self._calls, cast.seen.pin.address
        if calls is not None and not calls.cast(address, [source], self.step.count):
            self._calls = None

    def saved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedValue | None:
        """Note that autograd saves `tensor`; None in a step that is too long to be watched."""
        step = self.step
        if step.script is not None:
            found = self._walks_by(tensor, storage)
            if found is not None:
                return found
            self._leave_script()
        if step.is_full:
            return None
        seen = self._find(tensor, storage)
        seen.value.uses += 1
        decision = step.happened((SAVED, seen.number, seen.value.nbytes, None, ()), seen.number)
        decision = OFFLOAD if decision is None else decision
        self._expect_operation(tensor, seen, decision, is_first=seen.value.uses == 1)
        step.walk_on()
        return SavedValue(seen.value, decision, seen.result)

    def _expect_operation(
        self, tensor: torch.Tensor, seen: _Seen, decision: Decision, *, is_first: bool
    ) -> None:
        """Note of a saved value what has to be known when its operation returns."""
        made = base_of(tensor)
        if isinstance(decision, Replay) and seen.result is None:
            seen.result = Result(made, seen.value.nbytes, seen.pin, self.pins)
            seen.result.original = made.detach()  # its recipe is not known yet
        node = made.grad_fn
        if is_first and node is not None and node.name() == _CAST:
            is_new = node._sequence_nr() >= self._first_number
            self._casts.append(_Cast(seen, node, is_new, made.dtype))

    def begins(self) -> None:
        """Note that a function of the table begins."""
        self.step.functions += 1
        self._first_number = _next_number()
        if self._calls is not None:
            self._calls.begin()
        if self._casts:
            self._casts.clear()

    def goes_on(self, function: Function, arguments: Sequence[Any], made: Any) -> bool:
        """Tell whether what a function has made is no event, or an expected one that nothing needs.

        Where that is not known, it is no. Most functions of a step that follows its script are so.
        """
        step = self.step
        if self._calls is not None:
            self._calls.end()
        expected = step.expected
        if step.script is None or type(made) is not torch.Tensor or expected.what is CAST:
            return False
        if not made.requires_grad or (arguments and made is arguments[0]):
            return True
        if expected.matters or not _is_like(expected, function, made):
            return False
        if expected.leaves and made.nbytes >= LARGE_BYTES:
            self._note_call(made, _tensors(arguments))
            self.note_made(expected.value.number, made)
        step.advance()
        return True

    def ran(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        made: Any,
        timing: Callable[[], float] | None,
    ) -> None:
        """Note what a function of the table has made of its arguments."""
        step = self.step
        call = _Call(function, arguments, options)
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
        self._explain_casts(call.tensors())
        inputs = self._inputs_of(call)
        for index in large:
            output = outputs[index]
            storage = output.untyped_storage()
            if inputs is None or _lies_in(storage, call):
                continue  # what it reads may change unnoticed; or it has made no memory of its own
            seen = self._find(output, storage)
            value = seen.value
            value.operation = _name(function)
            value.is_expensive = function in EXPENSIVE
            value.inputs, value.timing = _numbers(inputs), timing
            event = (function, seen.number, value.nbytes, value.dtype, value.inputs)
            if isinstance(step.happened(event, seen.number), Replay):
                self._give_up(seen, call, inputs, output, None if outputs[0] is made else index)
        step.walk_on()

    def end(self) -> None:
        """Let go of everything: nothing runs or is saved any more."""
        self._seen.clear()
        self.ready.clear()
        self._casts.clear()
        self.pins = Pins()

    def _give_up(
        self, seen: _Seen, call: _Call, inputs: _Inputs, output: torch.Tensor, index: int | None
    ) -> None:
        """Have a value be recomputed: it is what `call` made, or of several results one."""
        if call.recipe is None:
            call.recipe = call.recipe_of(self._sources(call.tensors(), inputs), output.device.type)
        if seen.result is None:
            seen.result = Result(output, seen.value.nbytes, seen.pin, self.pins)
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
            value.operation, value.inputs = _name(torch.Tensor.to), _numbers(inputs)
            event = (CAST, seen.number, value.nbytes, cast.dtype, value.inputs)
            if isinstance(self.step.happened(event, seen.number), Replay):
                self._cast_again(cast, source, inputs)

    def _cast_again(self, cast: _Cast, source: torch.Tensor, inputs: _Inputs) -> None:
        if cast.seen.result is not None:
            call = _Call(torch.Tensor.to, (source, cast.dtype), {})
            recipe = call.recipe_of(self._sources([source], inputs), source.device.type)
            cast.seen.result.made_by(recipe, None)

    # --- along a script ---------------------------------------------------------------------

    def _walks_by(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> SavedValue | None:
        """Return what becomes of a saved tensor if the script expects it; None if it does not."""
        expected = self.step.expected
        if expected.what is not SAVED or expected.value.nbytes != storage.nbytes():
            return None
        result = None
        if expected.matters:
            seen = self._look_up(expected, tensor, storage)
            if seen is None:
                return None
            self._expect_operation(tensor, seen, expected.decision, is_first=expected.is_new)
            result = seen.result
        self._note_saved()
        self.step.advance()
        return SavedValue(expected.value, expected.decision, result)

    def _walks_past(self, call: _Call, made: Any) -> bool:
        """Tell whether what a call has made is what the script expects."""
        step = self.step
        while step.expected.what is CAST:
            if step.expected.matters and not self._walks_by_cast(step.expected, call):
                return False
            step.advance()
        outputs = _outputs(made)
        for index, output in enumerate(outputs):
            if not self._is_large(output):
                continue
            expected = step.expected
            if not _is_like(expected, call.function, output):
                if self._could_make_again(output.untyped_storage(), call):
                    return False
                continue
            place = None if outputs[0] is made else index
            if expected.matters and not self._walks_by_made(expected, call, output, place):
                return False
            if expected.matters or (expected.leaves and output.nbytes >= LARGE_BYTES):
                self._note_call(output, call.tensors())
            if expected.leaves:
                self.note_made(expected.value.number, output)
            step.advance()
        return True

    def note_made(self, number: int, output: torch.Tensor) -> None:
        """Note from when on the bytes of a value that will leave are there.

        That may be read before it leaves. It is, once a step has shown that it is not written to
        until then, uncounted.
        """
        kind = self.step.kind
        if output.nbytes < LARGE_BYTES or kind is None or self._publish is None:
            return
        if number in kind.changed:
            return
        sequence = self._publish(output)
        if not sequence:
            return
        storage, trial = output.untyped_storage(), None
        if number not in kind.unchanged:
            if not kind.goes_on_trying(number):
                kind.changed.add(number)
                return
            self.tries, sequence = True, 0
            trial = UnchangedTrial(kind, number, checksum(storage))
        self.pins.add(storage)
        ready = self.ready[storage._cdata] = Ready(SnapshotProof(output), sequence, trial)
        self._is_ready(output, ready)

    def _walks_by_made(
        self, expected: Expected, call: _Call, output: torch.Tensor, index: int | None
    ) -> bool:
        """Tell whether an output can be what the script expects, and do what becomes of that."""
        storage = output.untyped_storage()
        if not isinstance(expected.decision, Replay):
            return self._look_up(expected, output, storage) is not None
        inputs = self._meet(call.tensors(), expected.inputs)
        if inputs is None or not call.is_fixed() or _lies_in(storage, call):
            return False
        seen = self._look_up(expected, output, storage)
        if seen is None:
            return False
        self._give_up(seen, call, inputs, output, index)
        return True

    def _walks_by_cast(self, expected: Expected, call: _Call) -> bool:
        """Tell whether autocast has made the value that the script expects."""
        for cast in self._casts:
            if cast.seen.number == expected.value.number:
                source = cast.source_among(call.tensors())
                if source is None or not self._is_sound(source):
                    return False
                if isinstance(expected.decision, Replay):
                    inputs = self._meet([source], expected.inputs)
                    if inputs is None:
                        return False
                    self._cast_again(cast, source, inputs)
                self._note_cast(cast, source)
                return True
        return False

    def _meet(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> _Inputs | None:
        """Return what the inputs of a recipe are; None if they cannot be the expected values."""
        if len(tensors) != len(numbers):
            return None
        met: _Inputs = []
        for tensor, number in zip(tensors, numbers, strict=True):
            if not _is_plain(tensor):
                return None
            storage, seen = tensor.untyped_storage(), None
            if number != _CONSTANT:
                seen = self._met(tensor, storage, number)
                if seen is None:
                    return None
            elif not self._is_constant(tensor, storage):
                return None
            met.append(seen)
        return met

    def _met(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, number: int
    ) -> _Seen | None:
        """Return an input of a recipe as the value of that number, if it can be that."""
        if storage.nbytes() < self._least or not is_result(tensor):
            return None
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == tensor._version:
            return seen if seen.number == number else None
        assert self.step.kind is not None
        return self._see(self.step.kind.values[number], tensor, storage)

    def _could_make_again(self, storage: torch.UntypedStorage, call: _Call) -> bool:
        """Tell whether a call has made memory of its own, of what changes are counted of."""
        is_sound = call.is_fixed() and all(map(self._is_sound, call.tensors()))
        return is_sound and not _lies_in(storage, call)

    def _look_up(
        self, expected: Expected, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> _Seen | None:
        """Return the value that the script expects if a storage has it now."""
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == tensor._version:
            is_same = not expected.is_new and seen.number == expected.value.number
            return seen if is_same else None
        return self._see(expected.value, tensor, storage) if expected.is_new else None

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

    def _see(
        self, value: RecordedValue, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> _Seen:
        """Note which value a storage has now."""
        address = storage._cdata
        before = self._seen.get(address)
        pin = self.pins.add(storage) if before is None else before.pin
        seen = self._seen[address] = _Seen(value, tensor._version, pin)
        return seen

    def _find(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _Seen:
        """Return the value that a storage has now, a new one if it is not known."""
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == tensor._version:
            return seen
        number = len(self.step.values)
        value = RecordedValue(
            number=number,
            nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            shape=tensor.shape,
            device=tensor.device,
            is_result=is_result(tensor),
            layer=self._layer(number),
        )
        return self._see(self.step.add(value), tensor, storage)

    def _layer(self, number: int) -> str:
        """Return where a value is made or saved; where the step is like a known one, as there."""
        kind = self.step.kind
        if kind is not None and number < len(kind.values):
            return kind.values[number].layer
        return self._layers.current()

    def _inputs_of(self, call: _Call) -> _Inputs | None:
        """Return what a call's inputs are; None where one of its arguments could change unseen."""
        return self._inputs(call.tensors()) if call.is_fixed() else None

    def _inputs(self, tensors: Sequence[torch.Tensor]) -> _Inputs | None:
        """Return what the inputs of a recipe are; None where one could change uncounted."""
        found: _Inputs = []
        for tensor in tensors:
            if not self._is_sound(tensor):
                return None
            storage = tensor.untyped_storage()
            is_constant = self._is_constant(tensor, storage)
            found.append(None if is_constant else self._find(tensor, storage))
        return found

    def _is_sound(self, tensor: torch.Tensor) -> bool:
        """Tell whether a recipe may rest on a tensor: its changes are counted, or it is copied."""
        if not _is_plain(tensor):
            return False
        storage = tensor.untyped_storage()
        is_constant = self._is_constant(tensor, storage)
        # What is copied or restored lies in memory of PyTorch's own, and kernels go by that.
        return (is_result(tensor) or is_constant) and not storage.data_ptr() % ALIGNMENT_BYTES

    def _is_constant(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() < self._least or isinstance(base_of(tensor), torch.nn.Parameter)

    def _sources(self, tensors: Sequence[torch.Tensor], inputs: _Inputs) -> list[Source]:
        """Hold the inputs of a recipe."""
        return [self._source(tensor, seen) for tensor, seen in zip(tensors, inputs, strict=True)]

    def _source(self, tensor: torch.Tensor, seen: _Seen | None) -> Source:
        if seen is None:
            is_small = tensor.untyped_storage().nbytes() < self._least
            # What no operation made can be written to without being counted.
            return Alias.of(copied(tensor) if is_small and not is_result(tensor) else tensor)
        if seen.result is not None:
            seen.result.expect_use()
            version = SavedVersion.of(tensor, seen.pin.address)
            return Made(seen.result, View.of(tensor), version)
        return Saved(self.pack_input(tensor, seen.number), self._unpack)


_VALUES = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
"""Types of arguments that nobody can change."""


def _are_values(arguments: Iterable[Any]) -> bool:
    """Tell whether no argument but tensors can change; lists are copied when a recipe is made."""
    for argument in arguments:
        if type(argument) in _VALUES or isinstance(argument, (torch.Tensor, np.generic)):
            continue
        if not (isinstance(argument, (list, tuple)) and _are_values(argument)):
            return False
    return True


def _outputs(made: Any) -> Sequence[Any]:
    return made if type(made) in (tuple, list) else (made,)


def _is_like(expected: Expected, function: Function, output: torch.Tensor) -> bool:
    """Tell whether what a function has made can be the value that a script expects."""
    value = expected.value
    return (
        expected.what is function
        and value.dtype is output.dtype
        and value.nbytes == output.untyped_storage().nbytes()
    )


def _lies_in(storage: torch.UntypedStorage, call: _Call) -> bool:
    """Tell whether a storage is that of an argument."""
    address = storage._cdata
    return any(
        _is_plain(tensor) and tensor.untyped_storage()._cdata == address
        for tensor in call.tensors()
    )


def _tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):  # named tuples, too
            found += _tensors(argument)
    return found


def _replaced(argument: Any, sources: Iterator[Source]) -> Any:
    """Return an argument with the next sources in the place of its tensors.

    What is a list or tuple of any kind becomes a plain one, which PyTorch takes as well.
    """
    if isinstance(argument, torch.Tensor):
        return Input(next(sources), argument.requires_grad)
    if isinstance(argument, (list, tuple)):
        plain = list if isinstance(argument, list) else tuple
        return plain(_replaced(one, sources) for one in argument)
    return argument


def _numbers(inputs: _Inputs) -> tuple[int, ...]:
    return tuple(_CONSTANT if seen is None else seen.number for seen in inputs)


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
