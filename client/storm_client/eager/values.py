"""Which value of a step each storage holds, and how a recipe holds those that it rests on.

Storages are told apart by the address of their implementation, which a weak reference keeps from
being used again until the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from storm_client.eager.bits import copied
from storm_client.eager.calls import Call, is_plain
from storm_client.eager.events import RecordedValue
from storm_client.eager.followed_plan import Expected
from storm_client.eager.recognition import StepRecord
from storm_client.eager.recompute import Pins, Result
from storm_client.eager.sources import (
    ALIGNMENT_BYTES,
    Alias,
    Blank,
    Copied,
    Made,
    Saved,
    Source,
    Written,
)
from storm_client.monitoring.layers import Layers, Place
from storm_client.planner.decisions import Decision
from storm_client.saved.ranges import WeakStorage
from storm_client.saved.snapshots import Ready, base_of, is_result
from storm_client.saved.versions import SavedVersion, View

__all__ = ["Inputs", "SaveHooks", "Seen", "Values", "is_in_function", "numbers_of"]

_CONSTANT = -1
"""Stands for an input that stays: a parameter, or something small."""


class SaveHooks(NamedTuple):
    """Who handles what a step saves."""

    pack: Callable[[torch.Tensor, Decision, str], Any]
    """Hands over an input of recipes; given what is decided of it, and its layer."""
    unpack: Callable[[Any], torch.Tensor]
    publish: Callable[[torch.Tensor], int]
    """Returns a number that tells when a tensor has been made; 0 where nobody asks for that."""
    is_ready: Callable[[torch.Tensor, Ready], None]
    """Hears of what will leave by such a number."""


class Seen:
    """A storage of the step at hand, at one version."""

    __slots__ = ("before", "copy", "is_overwritten", "number", "pin", "result", "value", "version")

    def __init__(
        self, value: RecordedValue, version: int, pin: WeakStorage, before: Seen | None = None
    ) -> None:
        """It is `value` of the step as long as it has this version; `pin` knows the storage.

        `before` is what the storage was when it was last looked at, None if it was not.
        """
        self.before = before
        self.value = value
        self.number = value.number
        self.version = version
        self.pin = pin
        self.result: Result | None = None
        self.copy: Saved | None = None
        """Of one that no operation made, what recipes read in its stead."""
        self.is_overwritten = False
        """Whether its memory has got other bytes, uncounted."""


Inputs: TypeAlias = list[Seen | None]
"""What the tensors among a call's arguments are, None for what stays."""


class Values:
    """The values of one step, by storage; in the thread of its block."""

    def __init__(
        self,
        step: StepRecord,
        least: int,
        layers: Layers,
        hooks: SaveHooks,
    ) -> None:
        """Know what has `least` bytes; inputs of recipes are handed over by `hooks`."""
        self.pins = Pins()
        """Of all storages that were looked at; results hold it, too."""
        self._hooks = hooks
        self._step = step
        self._least = least
        self._layers = layers
        self._seen: dict[int, Seen] = {}
        self._readers: dict[int, tuple[torch.Tensor, RecordedValue]] = {}
        """By a parameter's identity, itself and what was made of it last."""

    def pack_input(self, tensor: torch.Tensor, number: int) -> Any:
        """Hand over a value that others are to be made from."""
        decision = self._step.decided(number, tensor.untyped_storage().nbytes())
        return self._hooks.pack(tensor, decision, self._step.layer(number))

    def forget(self) -> None:
        """Let go of everything."""
        for parameter, value in self._readers.values():
            if not parameter.untyped_storage().nbytes():
                value.parameter_bytes -= parameter.nbytes
                value.gathered_bytes += parameter.nbytes
        self._seen.clear()
        self._readers.clear()
        self.pins = Pins()

    def find(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, version: int | None = None
    ) -> Seen:
        """Return the value that a storage has at a version, now; a new one if it is not known."""
        version = tensor._version if version is None else version
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == version:
            return seen
        number, node = len(self._step.values), base_of(tensor).grad_fn or tensor.grad_fn
        value = RecordedValue(
            number=number,
            nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            shape=tensor.shape,
            device=tensor.device,
            is_result=is_result(tensor),
            made_by="" if node is None else node.name(),
            place=self._place(number),
        )
        return self._see(self._step.add(value), storage, version)

    def look_up(
        self,
        expected: Expected,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        version: int | None = None,
    ) -> Seen | None:
        """Return the value that the script expects if a storage has it at a version, now."""
        version = tensor._version if version is None else version
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == version:
            is_same = not expected.is_new and seen.number == expected.value.number
            return seen if is_same else None
        return self._see(expected.value, storage, version) if expected.is_new else None

    def _see(self, value: RecordedValue, storage: torch.UntypedStorage, version: int) -> Seen:
        """Note which value a storage has at a version, the last that is looked at."""
        address = storage._cdata
        before = self._seen.get(address)
        pin = self.pins.add(storage) if before is None else before.pin
        if before is not None:
            before.before = None  # no more is asked for
        seen = self._seen[address] = Seen(value, version, pin, before)
        return seen

    def before(self, tensor: torch.Tensor) -> Seen | None:
        """Return which value a call has written over to make `tensor`; None if not known.

        A call counts at least one change. Where that is the only one since the storage was looked
        at, the call has found it so.
        """
        seen = self._seen.get(tensor.untyped_storage()._cdata)
        if seen is not None and seen.version == tensor._version:
            seen = seen.before  # what was made was saved within the call
        return seen if seen is not None and seen.version + 1 == tensor._version else None

    def overwritten(self, tensor: torch.Tensor) -> Seen | None:
        """Note that a tensor's storage has another value from now on, which no version tells.

        Returns what it was; None if that is not known, or saved: autograd reads it as it is now.
        """
        seen = self._seen.pop(tensor.untyped_storage()._cdata, None)
        if seen is None:
            return None
        seen.is_overwritten = True
        if seen.result is not None:
            seen.result.is_overwritten = True
        return seen if seen.version == tensor._version and not seen.value.is_saved else None

    def former(self, call: Call, output: torch.Tensor) -> Sequence[Seen | None]:
        """Return what a call has written over to make an output, its first tensors."""
        if call.former or not call.overwrites(output):
            return call.former
        return [self.before(call.arguments[0])]

    def leave_script(self) -> None:
        """Know the storages by the step's own values from now on, no more by its script's."""
        values = self._step.values
        # What an operation that the script did not expect was made from may have no event yet.
        self._seen = {at: seen for at, seen in self._seen.items() if seen.number < len(values)}
        for seen in self._seen.values():
            seen.value = values[seen.number]

    def meet(self, call: Call, output: torch.Tensor, numbers: Sequence[int]) -> Inputs | None:
        """Return what a call has read for an output, if that can be the values of the numbers."""
        tensors = call.tensors()
        if call.reads_layout:
            return self.inputs(call)
        former = self.former(call, output)
        if not former and call.takes(output.untyped_storage()):
            return None
        for before, number in zip(former, numbers, strict=False):
            if before is None or before.result is None or before.number != number:
                return None
        others = self.meet_among(tensors[len(former) :], numbers[len(former) :])
        return None if others is None else [*former, *others]

    def meet_among(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Inputs | None:
        """Return what the inputs of a recipe are; None if they cannot be the expected values."""
        if len(tensors) != len(numbers):
            return None
        met: Inputs = []
        for tensor, number in zip(tensors, numbers, strict=True):
            if not is_plain(tensor):
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

    def _met(self, tensor: torch.Tensor, storage: torch.UntypedStorage, number: int) -> Seen | None:
        """Return an input of a recipe as the value of that number, if it can be that."""
        if storage.nbytes() < self._least or not self.is_sound(tensor):
            return None
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == tensor._version:
            return seen if seen.number == number else None
        assert self._step.signature is not None
        return self._see(self._step.signature.values[number], storage, tensor._version)

    def inputs(self, call: Call) -> Inputs | None:
        """Return what a call was given; None where that could change uncounted."""
        tensors = call.tensors()
        if call.reads_layout:
            return [None] * len(tensors) if all(map(self.is_sound, tensors)) else None
        others = self.inputs_among(tensors[len(call.former) :])
        return None if others is None else [*call.former, *others]

    def read_for(self, call: Call, output: torch.Tensor, inputs: Inputs) -> Inputs | None:
        """Return what a call has read for an output; None if that is no value of its own.

        What it has written over has to have been made by an operation.
        """
        former, values = self.former(call, output), self._step.values
        if not former:
            return None if call.takes(output.untyped_storage()) else inputs
        for before in former:  # if the script was left by this call, that may have no event yet
            if (
                before is None
                or before.number >= len(values)
                or not values[before.number].operation
            ):
                return None
        return [*former, *inputs[len(former) :]]

    def inputs_among(self, tensors: Sequence[torch.Tensor]) -> Inputs | None:
        """Return what the inputs of a recipe are; None where one could change uncounted."""
        found: Inputs = []
        for tensor in tensors:
            if not self.is_sound(tensor):
                return None
            storage = tensor.untyped_storage()
            is_constant = self._is_constant(tensor, storage)
            found.append(None if is_constant else self.find(tensor, storage))
        return found

    def is_sound(self, tensor: torch.Tensor) -> bool:
        """Tell whether a recipe may rest on a tensor: its changes are counted, or it is copied."""
        if not is_plain(tensor):
            return False
        storage = tensor.untyped_storage()
        if tensor.is_inference() and not self._is_constant(tensor, storage):
            return False  # it has no version
        # What is copied or restored lies in memory of PyTorch's own, and kernels go by that.
        return not storage.data_ptr() % ALIGNMENT_BYTES

    def reads_parameters(self, value: RecordedValue, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the backward pass of what was made makes gradients of parameters.

        It does so of each once: where several operations read one, in the last.
        """
        for tensor in {id(one): one for one in map(base_of, tensors)}.values():
            if tensor.requires_grad and isinstance(tensor, torch.nn.Parameter):
                self._step.gradients.reads(tensor)
                _, before = self._readers.get(id(tensor), (None, None))
                if before is not None:
                    before.parameter_bytes -= tensor.nbytes
                self._readers[id(tensor)] = tensor, value
                value.parameter_bytes += tensor.nbytes

    def is_large(self, output: Any, *, in_graph: bool) -> bool:
        """Tell whether an output matters, which has to be part of a graph if all others are.

        What a custom function makes becomes that at its end.
        """
        return (
            type(output) is torch.Tensor
            and (output.requires_grad or not in_graph or is_in_function())
            and output.layout is torch.strided
            and output.nbytes >= self._least
        )

    def sources(self, call: Call, output: torch.Tensor, inputs: Inputs) -> list[Source] | None:
        """Hold what a call has read for an output; None if that is gone and has no recipe."""
        tensors = call.tensors()
        if call.reads_layout:
            return [Blank.like(tensor) for tensor in tensors]
        count = len(self.former(call, output))
        results = [seen.result for seen in inputs[:count] if seen is not None and seen.result]
        if len(results) < count:
            return None
        written = map(Written.over, results, tensors)
        return [*written, *self.hold(tensors[count:], inputs[count:])]

    def hold(self, tensors: Sequence[torch.Tensor], inputs: Inputs) -> list[Source]:
        """Hold the inputs of a recipe."""
        return [self._source(tensor, seen) for tensor, seen in zip(tensors, inputs, strict=True)]

    def _source(self, tensor: torch.Tensor, seen: Seen | None) -> Source:
        if seen is None:
            is_small = tensor.untyped_storage().nbytes() < self._least
            # What no operation made can be written to without being counted.
            return Alias.of(copied(tensor) if is_small and not is_result(tensor) else tensor)
        if seen.result is not None:
            seen.result.expect_use()
            version = SavedVersion.of(tensor, seen.pin.address)
            return Made(seen.result, View.of(tensor), version)
        if is_result(tensor):
            return Saved(self.pack_input(tensor, seen.number), self._hooks.unpack, seen)
        if seen.copy is None:
            seen.copy = Saved(self.pack_input(copied(tensor), seen.number), self._hooks.unpack)
        return Copied(seen.copy, View.of(tensor))

    def _is_constant(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() < self._least or isinstance(base_of(tensor), torch.nn.Parameter)

    def _place(self, number: int) -> Place:
        """Return where a value is made or saved; where the step is like a known one, as there."""
        signature = self._step.signature
        if signature is not None and number < len(signature.values):
            return signature.values[number].place
        return self._layers.current()


def is_in_function() -> bool:
    """Tell whether the `forward` of a custom function runs: autograd's alone is without both."""
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def numbers_of(inputs: Inputs) -> tuple[int, ...]:
    """Return the numbers of the values that a recipe rests on, -1 for what stays."""
    return tuple(_CONSTANT if seen is None else seen.number for seen in inputs)
