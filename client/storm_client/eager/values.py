"""Tracks which value of a step each storage holds.

A storage is identified by the address of its implementation. A weak reference prevents that address
from being reused until the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from storm_client.eager.calls import Call, is_plain
from storm_client.eager.events import RecordedValue
from storm_client.eager.followed_plan import Expected
from storm_client.eager.recognition import StepRecord
from storm_client.eager.recompute import Pins
from storm_client.eager.sources import (
    ALIGNMENT_BYTES,
    HeldInputs,
)
from storm_client.eager.tracked import TrackedStorage
from storm_client.monitoring.layers import Layers, Place
from storm_client.planner.decisions import Decision
from storm_client.saved.snapshots import base_of, is_result, maker_of

__all__ = ["Inputs", "SaveHooks", "Values", "is_in_function", "numbers_of"]

_CONSTANT = -1
"""Stands for an input that is always kept: a parameter, or a small tensor."""


class SaveHooks(NamedTuple):
    """Functions that pack and unpack the values of a step."""

    pack_input: Callable[[torch.Tensor, Decision, str], Any]
    """Keeps or offloads an input of recipes, given its decision and its layer."""
    restore_input: Callable[[Any], torch.Tensor]
    inputs: HeldInputs
    """Has them read copies when a custom function's backward gets their memory."""
    is_at_rest: Callable[[torch.Tensor], bool]
    """Whether a small constant is a parameter, which recipes may read where it is."""


Inputs: TypeAlias = list[TrackedStorage | None]
"""The values of the tensors among a call's arguments; None for those that are always kept."""


class Values:
    """The values of one step, by storage; used in the thread of its block."""

    def __init__(
        self,
        step: StepRecord,
        min_bytes: int,
        layers: Layers,
        *,
        counts_gradless: bool,
    ) -> None:
        """Track storages of at least `min_bytes`.

        If it `counts_gradless`, results without gradients are values as well.
        """
        self.pins = Pins()
        """Weak references to all storages that were looked at; results hold this object, too."""
        self._step = step
        self._min_bytes = min_bytes
        self._counts_gradless = counts_gradless
        self._layers = layers
        self._tracked: dict[int, TrackedStorage] = {}
        self._readers: dict[int, tuple[torch.Tensor, RecordedValue]] = {}
        """By a parameter's identity: the parameter, and the last value made from it."""
        self._made: set[int] = set()
        """Addresses of the storages without gradients that functions of the step have returned."""

    def forget(self) -> None:
        """Free everything."""
        for parameter, value in self._readers.values():
            if not parameter.untyped_storage().nbytes():
                value.parameter_bytes -= parameter.nbytes
                value.gathered_bytes += parameter.nbytes
        self._tracked.clear()
        self._readers.clear()
        self._made.clear()
        self.pins = Pins()

    def find(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, version: int | None = None
    ) -> TrackedStorage:
        """Return the value of a storage at a version, by default the present; add unknown ones."""
        version = tensor._version if version is None else version
        tracked = self._tracked.get(storage._cdata)
        if tracked is not None and tracked.version == version:
            return tracked
        number, node = len(self._step.values), maker_of(tensor)
        is_made = is_result(tensor)
        value = RecordedValue(
            number=number,
            nbytes=storage.nbytes(),
            dtype=tensor.dtype,
            shape=tensor.shape,
            device=tensor.device,
            is_result=is_made,
            is_copied=not is_made,
            made_by="" if node is None else node.name(),
            is_made_inside=node is None and storage._cdata in self._made,
            place=self._place(number),
        )
        return self._track(self._step.add(value), storage, version)

    def look_up(
        self,
        expected: Expected,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        version: int | None = None,
    ) -> TrackedStorage | None:
        """Return the expected value if a storage can hold it at a version, else None."""
        version = tensor._version if version is None else version
        tracked = self._tracked.get(storage._cdata)
        if tracked is not None and tracked.version == version:
            is_same = not expected.is_new and tracked.number == expected.value.number
            return tracked if is_same else None
        return self._track(expected.value, storage, version) if expected.is_new else None

    def _track(
        self, value: RecordedValue, storage: torch.UntypedStorage, version: int
    ) -> TrackedStorage:
        """Record the value that a storage holds at a version, as the latest one looked at."""
        address = storage._cdata
        before = self._tracked.get(address)
        pin = self.pins.add(storage) if before is None else before.pin
        if before is not None:
            before.before = None  # only one former value is ever needed
        tracked = self._tracked[address] = TrackedStorage(value, version, pin, before)
        return tracked

    def before(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Return the value that a call has overwritten to make `tensor`; None if unknown.

        A call increases the version at least once. If that is the only change since the storage was
        looked at, the call has found the value that it had then.
        """
        tracked = self._tracked.get(tensor.untyped_storage()._cdata)
        if tracked is not None and tracked.version == tensor._version:
            tracked = tracked.before  # the result was saved within the call
        return tracked if tracked is not None and tracked.version + 1 == tensor._version else None

    def overwritten(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Record that a tensor's storage was modified without a version counting it.

        Returns its former value; None if that is unknown, or was saved: autograd then reads the
        memory as it is now.
        """
        tracked = self._tracked.pop(tensor.untyped_storage()._cdata, None)
        if tracked is None:
            return None
        tracked.is_overwritten = True
        if tracked.result is not None:
            tracked.result.is_overwritten = True
        return (
            tracked if tracked.version == tensor._version and not tracked.value.is_saved else None
        )

    def former(self, call: Call, output: torch.Tensor) -> Sequence[TrackedStorage | None]:
        """Return the values that a call has overwritten to make an output: its first tensors."""
        if call.former or not call.overwrites(output):
            return call.former
        return [self.before(call.arguments[0])]

    def hold_results(self) -> None:
        """Hold the results that others hold, too.

        The step is unlike those in which recomputation was tried, so they may be written to
        uncounted.
        """
        for tracked in self._tracked.values():
            if tracked.result is not None:
                tracked.result.hold()

    def leave_script(self) -> None:
        """Map the storages to the step's own values from now on, no longer to the script's."""
        values = self._step.values
        # The inputs of an operation that the script did not expect may have no event yet.
        self._tracked = {
            at: tracked for at, tracked in self._tracked.items() if tracked.number < len(values)
        }
        for tracked in self._tracked.values():
            tracked.value = values[tracked.number]

    def match_inputs(
        self, call: Call, output: torch.Tensor, numbers: Sequence[int]
    ) -> Inputs | None:
        """Return the inputs of a call for an output; None unless they can be values `numbers`."""
        tensors = call.tensors()
        if call.reads_layout:
            return self.inputs(call)
        former = self.former(call, output)
        if not former and call.takes(output.untyped_storage()):
            return None
        for before, number in zip(former, numbers, strict=False):
            if before is None or before.result is None or before.number != number:
                return None
        others = self.match_tensors(tensors[len(former) :], numbers[len(former) :])
        return None if others is None else [*former, *others]

    def match_tensors(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> Inputs | None:
        """Return the inputs of a recipe; None if they cannot be the expected values."""
        if len(tensors) != len(numbers):
            return None
        matched: Inputs = []
        for tensor, number in zip(tensors, numbers, strict=True):
            if not is_plain(tensor):
                return None
            storage, tracked = tensor.untyped_storage(), None
            if number != _CONSTANT:
                tracked = self._match(tensor, storage, number)
                if tracked is None:
                    return None
            elif not self._is_constant(tensor, storage):
                return None
            matched.append(tracked)
        return matched

    def _match(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, number: int
    ) -> TrackedStorage | None:
        """Return an input of a recipe as the value `number`, if it can be that value."""
        if storage.nbytes() < self._min_bytes or not self.is_sound(tensor):
            return None
        tracked = self._tracked.get(storage._cdata)
        if tracked is not None and tracked.version == tensor._version:
            return tracked if tracked.number == number else None
        assert self._step.signature is not None
        return self._track(self._step.signature.values[number], storage, tensor._version)

    def inputs(self, call: Call) -> Inputs | None:
        """Return the inputs of a call; None if one of them could change uncounted."""
        tensors = call.tensors()
        if call.reads_layout:
            return [None] * len(tensors) if all(map(self.is_sound, tensors)) else None
        others = self.inputs_among(tensors[len(call.former) :])
        return None if others is None else [*call.former, *others]

    def read_for(self, call: Call, output: torch.Tensor, inputs: Inputs) -> Inputs | None:
        """Return the inputs of a call for an output; None if the output is not to be recomputed.

        It cannot be if it shares memory with an argument that the call has not overwritten, or if
        no known operation made a value that the call has overwritten.
        """
        former, values = self.former(call, output), self._step.values
        if call.brings(output):
            return None
        if not former:
            return None if call.takes(output.untyped_storage()) else inputs
        for before in former:  # if this call left the script, the value may have no event yet
            if (
                before is None
                or before.number >= len(values)
                or not values[before.number].operation
            ):
                return None
        return [*former, *inputs[len(former) :]]

    def inputs_among(self, tensors: Sequence[torch.Tensor]) -> Inputs | None:
        """Return the inputs of a recipe; None if one of them could change uncounted."""
        found: Inputs = []
        for tensor in tensors:
            if not self.is_sound(tensor):
                return None
            storage = tensor.untyped_storage()
            is_constant = self._is_constant(tensor, storage)
            found.append(None if is_constant else self.find(tensor, storage))
        return found

    def is_sound(self, tensor: torch.Tensor) -> bool:
        """Return whether a recipe may read a tensor: its changes are counted, or it is copied."""
        if not is_plain(tensor):
            return False
        storage = tensor.untyped_storage()
        if tensor.is_inference() and not self._is_constant(tensor, storage):
            return False  # it has no version
        # Copied or restored tensors are in PyTorch's own memory, and kernels depend on alignment.
        return not storage.data_ptr() % ALIGNMENT_BYTES

    def made_inside(self, call: Call, outputs: Iterable[Any]) -> None:
        """Record which outputs of a call have no gradient, and do not come from another device."""
        for output in outputs:
            if not is_plain(output) or output.requires_grad or not torch.is_grad_enabled():
                continue
            if output.nbytes < self._min_bytes or call.brings(output):
                continue
            storage = output.untyped_storage()
            if storage._cdata not in self._made:
                self._made.add(storage._cdata)
                self.pins.add(storage)  # so that no other storage gets its address

    def reads_parameters(self, value: RecordedValue, tensors: Iterable[torch.Tensor]) -> None:
        """Record the parameters whose gradients are made in the backward pass of a value.

        Each gradient counts once: if several operations read a parameter, in the last of them.
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
        """Return whether an output is a large tensor; with `in_graph` it must count."""
        return (
            type(output) is torch.Tensor
            and (not in_graph or self.counts(output))
            and output.layout is torch.strided
            and output.nbytes >= self._min_bytes
        )

    def counts(self, output: torch.Tensor) -> bool:
        """Return whether an output is a value of the step: part of a graph, or counted anyway.

        Results inside a custom function join the graph only at the function's end, so they count.
        """
        counts_anyway = self._counts_gradless and torch.is_grad_enabled()
        return output.requires_grad or counts_anyway or is_in_function()

    def _is_constant(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() < self._min_bytes or isinstance(base_of(tensor), torch.nn.Parameter)

    def _place(self, number: int) -> Place:
        """Return where in the model a value is made or saved, from a matching signature if any."""
        signature = self._step.signature
        if signature is not None and number < len(signature.values):
            return signature.values[number].place
        return self._layers.current()


def is_in_function() -> bool:
    """Return whether the `forward` of a custom function runs.

    Only there forward-mode differentiation is off while inference mode is off, too.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def numbers_of(inputs: Inputs) -> tuple[int, ...]:
    """Return the numbers of a recipe's inputs; -1 for those that are always kept."""
    return tuple(_CONSTANT if tracked is None else tracked.number for tracked in inputs)
