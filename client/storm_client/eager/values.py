"""Which value of a step each storage holds, and how a recipe holds those that it rests on.

Storages are told apart by the address of their implementation, which a weak reference keeps from
being used again until the block ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from storm_client.eager.bits import copied
from storm_client.eager.calls import is_plain
from storm_client.eager.recompute import Alias, Copied, Made, Pins, Result, Saved, Source
from storm_client.eager.signature import Expected, RecordedValue, StepRecord
from storm_client.monitoring.layers import Layers
from storm_client.saved.ranges import WeakStorage
from storm_client.saved.snapshots import base_of, is_result
from storm_client.saved.versions import SavedVersion, View

__all__ = ["Inputs", "Seen", "Values", "numbers_of"]

_CONSTANT = -1
"""Stands for an input that stays: a parameter, or something small."""

ALIGNMENT_BYTES = 64
"""At a multiple of which PyTorch's own memory begins, on a GPU of more. What lies otherwise, as
NumPy's may, has its first elements added by themselves."""


class Seen:
    """A storage of the step at hand, at one version."""

    __slots__ = ("copy", "is_overwritten", "number", "pin", "result", "value", "version")

    def __init__(self, value: RecordedValue, version: int, pin: WeakStorage) -> None:
        """It is `value` of the step as long as it has this version; `pin` knows the storage."""
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
        *,
        pack: Callable[[torch.Tensor, int], Any],
        unpack: Callable[[Any], torch.Tensor],
    ) -> None:
        """Know what has `least` bytes; inputs of recipes are handed over by `pack`."""
        self.pins = Pins()
        """Of all storages that were looked at; results hold it, too."""
        self.pack = pack
        self._unpack = unpack
        self._step = step
        self._least = least
        self._layers = layers
        self._seen: dict[int, Seen] = {}

    def forget(self) -> None:
        """Let go of everything."""
        self._seen.clear()
        self.pins = Pins()

    def find(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Seen:
        """Return the value that a storage has now, a new one if it is not known."""
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == tensor._version:
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
            layer=self._layer(number),
        )
        return self._see(self._step.add(value), tensor, storage)

    def look_up(
        self, expected: Expected, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> Seen | None:
        """Return the value that the script expects if a storage has it now."""
        seen = self._seen.get(storage._cdata)
        if seen is not None and seen.version == tensor._version:
            is_same = not expected.is_new and seen.number == expected.value.number
            return seen if is_same else None
        return self._see(expected.value, tensor, storage) if expected.is_new else None

    def _see(
        self, value: RecordedValue, tensor: torch.Tensor, storage: torch.UntypedStorage
    ) -> Seen:
        """Note which value a storage has now."""
        address = storage._cdata
        before = self._seen.get(address)
        pin = self.pins.add(storage) if before is None else before.pin
        seen = self._seen[address] = Seen(value, tensor._version, pin)
        return seen

    def overwritten(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another value from now on, which no version tells."""
        seen = self._seen.pop(storage._cdata, None)
        if seen is not None:
            seen.is_overwritten = True
            if seen.result is not None:
                seen.result.is_overwritten = True

    def leave_script(self) -> None:
        """Know the storages by the step's own values from now on, no more by its script's."""
        values = self._step.values
        # What an operation that the script did not expect was made from may have no event yet.
        self._seen = {at: seen for at, seen in self._seen.items() if seen.number < len(values)}
        for seen in self._seen.values():
            seen.value = values[seen.number]

    def meet(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> Inputs | None:
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
        assert self._step.kind is not None
        return self._see(self._step.kind.values[number], tensor, storage)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> Inputs | None:
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

    def is_large(self, output: Any, *, in_graph: bool) -> bool:
        """Tell whether an output matters, which has to be part of a graph if all others are."""
        return (
            type(output) is torch.Tensor
            and (output.requires_grad or not in_graph)
            and output.layout is torch.strided
            and output.nbytes >= self._least
        )

    def sources(self, tensors: Sequence[torch.Tensor], inputs: Inputs) -> list[Source]:
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
            return Saved(self.pack(tensor, seen.number), self._unpack, seen)
        if seen.copy is None:
            seen.copy = Saved(self.pack(copied(tensor), seen.number), self._unpack)
        return Copied(seen.copy, View.of(tensor))

    def _is_constant(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() < self._least or isinstance(base_of(tensor), torch.nn.Parameter)

    def _layer(self, number: int) -> str:
        """Return where a value is made or saved; where the step is like a known one, as there."""
        kind = self._step.kind
        if kind is not None and number < len(kind.values):
            return kind.values[number].layer
        return self._layers.current()


def numbers_of(inputs: Inputs) -> tuple[int, ...]:
    """Return the numbers of the values that a recipe rests on, -1 for what stays."""
    return tuple(_CONSTANT if seen is None else seen.number for seen in inputs)
