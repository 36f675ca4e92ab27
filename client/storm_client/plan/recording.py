"""Watches what a step runs, and makes the recipes that its plan asks for.

While a block with a plan to learn or with something to replay runs, each of PyTorch's functions
passes through a Recorder. It costs the host some microseconds a call, so a plan without replays
runs without. What an operation has just made is looked at only if it is large and an operation of
the table made it: then it is a value of the step, and if the plan wants it made again, its recipe
is made at once, while the inputs are as the operation found them.

Storages are told apart by the address of their implementation, which a weak reference keeps from
being used again until the block ends.
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
from storm_client.plan.kinds import StepRecord, Value
from storm_client.plan.operations import DEAR, Function
from storm_client.plan.recipes import Alias, Ends, Made, Recipe, Result, Saved, Source
from storm_client.saved import View, WeakStorage, base_of, is_result

__all__ = ["Mark", "Recorder", "Recording", "Seen", "Span", "mark"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Mark: TypeAlias = float | torch.cuda.Event
"""A moment, on the host or on a stream."""

_CAST = "ToCopyBackward0"
"""The name of a cast's node in the graph."""

_CONSTANT = -1
"""Stands for an input that stays: a parameter, or something small."""


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
    source: object
    """The argument's node in the graph."""
    dtype: torch.dtype


class Recording:
    """The values of one step, by storage; in the thread of its block."""

    def __init__(
        self,
        step: StepRecord,
        least: int,
        *,
        pack: Callable[[torch.Tensor, int], Any],
        unpack: Callable[[Any], torch.Tensor],
        functions: frozenset[Function],
        ends: Ends,
        layers: Layers,
    ) -> None:
        """Look at what has `least` bytes; inputs are handed over by `pack`.

        `functions` may be run again, `ends` watches results.
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
        self._seen: dict[int, Seen] = {}
        self._casts: list[_Cast] = []
        """What was saved since the last function of the table began."""

    def saved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[Seen, Decision]:
        """Note that autograd saves `tensor`; return its value and what is to become of it."""
        seen = self._find(tensor, storage)
        seen.value.uses += 1
        decision = self.step.happened(("saved", seen.number, seen.value.nbytes), seen.number)
        made = base_of(tensor)
        if isinstance(decision, Replay) and seen.result is None:
            # Its operation has yet to return.
            seen.result = Result(made, seen.value.nbytes, self._ends)
        if seen.value.uses == 1 and made.grad_fn is not None and made.grad_fn.name() == _CAST:
            self._casts.append(_Cast(seen, made.grad_fn.next_functions[0][0], made.dtype))
        return seen, OFFLOAD if decision is None else decision

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
        if self.step.is_full:
            self.end()
            return
        outputs = made if type(made) in (tuple, list) else (made,)
        large = [index for index, output in enumerate(outputs) if self._is_large(output)]
        if not large and not self._casts:
            return
        tensors = list(_tensors(arguments)) + list(_tensors(options.values()))
        self._explain_casts(tensors)
        storages = {tensor.untyped_storage()._cdata for tensor in tensors if _is_plain(tensor)}
        recipe: Recipe | None = None
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
            event = (function, seen.number, value.nbytes, value.dtype, *inputs)
            if not isinstance(self.step.happened(event, seen.number), Replay):
                continue
            if recipe is None:
                recipe = self._recipe(function, arguments, options, output.device.type)
            if seen.result is None:
                seen.result = Result(output, value.nbytes, self._ends)
            seen.result.made_by(recipe, None if outputs[0] is made else index)

    def end(self) -> None:
        """Let go of everything: nothing runs or is saved any more."""
        self._seen.clear()
        self._casts.clear()
        while self.pins:
            self.pins.pop().free()

    def _explain_casts(self, tensors: list[torch.Tensor]) -> None:
        """Note of what was saved while a function ran which of its arguments it is a copy of."""
        casts, self._casts = self._casts, []
        for seen, node, dtype in casts:
            source = next((tensor for tensor in tensors if _is_node_of(node, tensor)), None)
            inputs = None if source is None else self._inputs([source])
            if source is None or inputs is None:
                continue
            value = seen.value
            value.operation, value.inputs = _name(torch.Tensor.to), inputs
            event = (torch.Tensor.to, seen.number, value.nbytes, dtype, *inputs)
            decision = self.step.happened(event, seen.number)
            if isinstance(decision, Replay) and seen.result is not None:
                recipe = self._recipe(torch.Tensor.to, (source, dtype), {}, source.device.type)
                seen.result.made_by(recipe, None)

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
            if not _is_plain(tensor):
                return None
            if self._is_constant(tensor):
                numbers.append(_CONSTANT)
            elif is_result(tensor):
                numbers.append(self._find(tensor, tensor.untyped_storage()).number)
            else:
                return None
        return tuple(numbers)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage().nbytes() < self._least:
            return True
        base = tensor._base if tensor._is_view() else tensor
        return isinstance(base, torch.nn.Parameter)

    def _recipe(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        device: str,
    ) -> Recipe:
        return Recipe(
            function,
            [self._held(argument) for argument in arguments],
            {name: self._held(value) for name, value in options.items()},
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
        seen = self._find(tensor, tensor.untyped_storage())
        if seen.result is not None:
            seen.result.expect_use()
            return Made(seen.result, View.of(tensor))
        return Saved(self._pack(tensor, seen.number), self._unpack)


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
    """The time between two marks, as a function of no arguments."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Mark, end: Mark) -> None:
        self._begin = begin
        self._end = end

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
