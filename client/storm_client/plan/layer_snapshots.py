"""A layer and what it is given as they were, to compare with later or to give once more.

Calls of a layer are made again in the backward pass, and in the trial that shows whether they may.
What they read is noted when the first is made: modules and their attributes, parameters, buffers
and arguments with their versions, and PyTorch's generators of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Final

import torch

__all__ = [
    "NUMBERS",
    "Attributes",
    "RandomStates",
    "TensorStates",
    "address_of",
    "attributes_of",
    "copied",
    "is_same",
    "own_tensors",
    "replaced",
    "tensors_in",
    "version_of",
]

NUMBERS: Final = (
    int,
    float,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)
"""What nobody can write to."""


class Attributes:
    """The modules of a layer and their attributes, as they were when it was tried.

    The layer itself is not kept. What containers among the attributes hold is not noted.
    """

    def __init__(self, parts: Sequence[torch.nn.Module]) -> None:
        """Note the present; the first of `parts` is the layer."""
        self._inner = parts[1:]
        self._of_parts = list(map(attributes_of, parts))
        self._values = [tuple(attributes.values()) for attributes in self._of_parts]
        values = chain.from_iterable(self._values)
        self.tensors = [value for value in values if type(value) is torch.Tensor]
        """Those that are neither parameters nor buffers."""
        self.own = own_tensors(parts)
        """The parameters and buffers."""
        self._hooks = [
            hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)
        ]
        self._tables = [
            table for part in parts for table in (part._modules, part._parameters, part._buffers)
        ]
        self._in_tables = list(chain.from_iterable(table.values() for table in self._tables))

    def is_untouched(self, layer: torch.nn.Module) -> bool:
        """Tell whether all that a layer refers to is the same objects, and nobody has hooks on it.

        That is quick. If not, it may still be equal.
        """
        parts = (layer, *self._inner)
        if not all(map(_has_the_same, parts, self._values)):
            return False
        if any(self._hooks) or sum(map(len, self._tables)) != len(self._in_tables):
            return False
        in_tables = chain.from_iterable(table.values() for table in self._tables)
        return all(map(is_, in_tables, self._in_tables))

    def is_of(self, parts: Sequence[torch.nn.Module]) -> bool:
        """Tell whether a layer has these modules still, in the modes in which they were."""
        return parts[1:] == self._inner and all(
            part.training is attributes["training"]
            for part, attributes in zip(parts, self._of_parts, strict=True)
        )

    def difference(self, parts: Iterable[torch.nn.Module]) -> str:
        """Return which has become another, the modes of modules left out; empty where none has."""
        for part, before, values in zip(parts, self._of_parts, self._values, strict=True):
            if _has_the_same(part, values):
                continue
            now = attributes_of(part)
            for name in (before | now).keys() - {"training"}:
                if not is_same(now.get(name, _NOTHING), before.get(name, _NOTHING)):
                    return f"attribute {name!r}"
        return ""


def _has_the_same(part: torch.nn.Module, values: Sequence[object]) -> bool:
    """Tell whether a module's attributes are these objects, in this order."""
    now = part.__dict__
    count = len(now) - ("forward" in now)  # which stands behind the others
    return count == len(values) and all(map(is_, now.values(), values))


class TensorStates:
    """Tensors as they were: how often each was written to, where its data lies, its gradient."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        """Note the present."""
        self._tensors = tensors
        self._versions = _versions_of(tensors)
        self._needed = [tensor.requires_grad for tensor in tensors]

    def difference(self) -> str:
        """Return which was written to, has other data, or needs a gradient or none now.

        Empty where none was.
        """
        versions = _versions_of(self._tensors)
        needed = [tensor.requires_grad for tensor in self._tensors]
        if versions == self._versions and needed == self._needed:
            return ""
        for number, tensor in enumerate(self._tensors):
            if (versions[number], needed[number]) != (self._versions[number], self._needed[number]):
                return f"tensor of shape {list(tensor.shape)}"
        return ""

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether these are the same tensors, whatever was written to them."""
        return len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))


def _versions_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    try:
        return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
    except RuntimeError:  # of inference mode's nothing is counted, and sparse ones lie nowhere
        return [(version_of(tensor), address_of(tensor)) for tensor in tensors]


_NOTHING: Final = object()


def attributes_of(part: torch.nn.Module) -> dict[str, Any]:
    """Return what a module has, but for a forward that stands before its class's."""
    attributes = part.__dict__.copy()
    attributes.pop("forward", None)  # what stands there while steps are under way
    return attributes


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, as far as that is counted."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's data lies, which is elsewhere once it was given other data."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two are the same object, or equal numbers, words or lists of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    return isinstance(one, NUMBERS) and bool(one == other)


class RandomStates:
    """PyTorch's generators of random numbers, as they were."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the present ones of the CPU, and of the GPUs of some tensors."""
        ordinals = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
        self._generators = [torch.default_generator]
        self._generators += [torch.cuda.default_generators[ordinal] for ordinal in ordinals]
        self._states = [one.get_state() for one in self._generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have them be as they were; then as they are now."""
        now = [one.get_state() for one in self._generators]
        try:
            for generator, state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            yield
        finally:
            for generator, state in zip(self._generators, now, strict=True):
                generator.set_state(state)


def own_tensors(parts: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules, without those of their parts."""
    found: list[torch.Tensor | None] = []
    for part in parts:
        found += part._parameters.values()
        found += part._buffers.values()
    return [tensor for tensor in found if tensor is not None]


def tensors_in(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among some arguments.

    Raises:
        TypeError: one could hold what calls change.
    """
    found: list[torch.Tensor] = []
    for argument in arguments:
        if type(argument) in (torch.Tensor, torch.nn.Parameter):
            found.append(argument)
        elif type(argument) in (tuple, list, dict):
            found += tensors_in(argument.values() if type(argument) is dict else argument)
        elif not isinstance(argument, NUMBERS):
            raise TypeError(
                f"it is given a {type(argument).__name__}, which each call may write to; if that "
                "is a cache, train with model.config.use_cache = False"
            )
    return found


def copied(argument: Any) -> Any:
    """Return an argument with lists and dicts of its own, in which are the same tensors."""
    if type(argument) is dict:
        return {name: copied(value) for name, value in argument.items()}
    if type(argument) in (tuple, list):
        return type(argument)(map(copied, argument))
    return argument


def replaced(argument: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Return arguments with those of `tensors`, by the id of each, in the place of theirs."""
    if type(argument) in (torch.Tensor, torch.nn.Parameter):
        return tensors.get(id(argument), argument)
    if type(argument) is dict:
        return {name: replaced(value, tensors) for name, value in argument.items()}
    if type(argument) in (tuple, list):
        return type(argument)([replaced(value, tensors) for value in argument])
    return argument
