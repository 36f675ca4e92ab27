"""A function that has been run on its arguments: what of them are tensors, and what may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from storm_client.eager.byproducts import FORMER, Byproduct, Depends
from storm_client.eager.launches import Kernel
from storm_client.eager.operations import Function, may_overwrite
from storm_client.eager.recompute import Input, Recipe
from storm_client.eager.sources import Source

if TYPE_CHECKING:
    from storm_client.eager.values import Seen
    from storm_client.native import _follow

__all__ = ["Call", "HiddenCall", "is_plain", "name_of", "outputs_of", "replaced", "tensors_among"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_VALUES = (
    type(None), type(...), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
"""Types of arguments that nobody can change."""


class HiddenCall(NamedTuple):
    """A call of an operator of which no function of Python's tells, as native/call_log.cpp does."""

    name: str
    arguments: list[Any]
    made: torch.Tensor
    is_of_attention: bool
    """Whether it is part of an attention, or casts an argument of that: autocast is off there."""
    draw: _follow.Draw | None
    """What it has drawn of random numbers; None for none, and where that cannot be noted."""
    kept: list[torch.Tensor]
    """What was saved while it drew."""
    version: int
    """Of what it has made, which later calls may have written over."""
    entry: int
    """Where the log has noted it; -1 where it has not."""


class Call:
    """A function that has been run on its arguments."""

    __slots__ = (
        "_tensors", "arguments", "draw", "former", "function", "hidden", "options", "recipe",
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        draw: _follow.Draw | None = None,
        *,
        former: Sequence[Seen | None] = (),
        hidden: HiddenCall | None = None,
    ) -> None:
        """`draw` is what it has drawn of random numbers; None for none.

        `former` is what a launch has written over, its first tensors: None where that is not known.
        `hidden` is what tells of the call if no function of Python's does.
        """
        self.draw = draw
        self.former = former
        self.hidden = hidden
        self.function = function
        self.arguments = arguments
        self.options = options
        self.recipe: Recipe | None = None
        """Of all its results, once one of them is to be recomputed."""
        self._tensors: list[torch.Tensor] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among its arguments."""
        if self._tensors is None:
            self._tensors = tensors_among(self.arguments)
            if self.options:
                self._tensors += tensors_among(self.options.values())
        return self._tensors

    @property
    def is_launch(self) -> bool:
        """Whether the function is a kernel, of which memory for its results is no part."""
        return isinstance(self.function, Kernel)

    @property
    def is_byproduct(self) -> bool:
        """Whether it makes what another call has kept."""
        return isinstance(self.function, Byproduct)

    @property
    def reads_layout(self) -> bool:
        """Whether it makes the same whatever is in the tensors that it was given."""
        return isinstance(self.function, Byproduct) and self.function.depends is Depends.LAYOUT

    @property
    def version(self) -> int | None:
        """At which version its result was what it has made; None for the present one."""
        return None if self.hidden is None or self.is_byproduct else self.hidden.version

    @property
    def entry(self) -> int:
        """Where the log has noted it; -1 where it tells of what the present function makes."""
        return -1 if self.hidden is None else self.hidden.entry

    @property
    def may_cast(self) -> bool:
        """Whether autocast has cast what it was given, if that is on."""
        return self.hidden is None or not self.hidden.is_of_attention

    def is_fixed(self) -> bool:
        """Tell whether all of its arguments that are no tensors are values, which never change."""
        return _are_values(self.arguments) and _are_values(self.options.values())

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is that of an argument."""
        address = storage._cdata
        return any(
            is_plain(tensor) and tensor.untyped_storage()._cdata == address
            for tensor in self.tensors()
        )

    def overwrites(self, output: Any) -> bool:
        """Tell whether an output is its first argument, and it read no other from that memory.

        Not of views, of which other parts are not written to. A copy of what such a call has found
        in its argument is made like its output.
        """
        if self.function is FORMER:
            return True
        if not (may_overwrite(self.function) and self.arguments and output is self.arguments[0]):
            return False
        if output._is_view():
            return False
        address = output.untyped_storage()._cdata
        others = self.tensors()[1:]
        return all(is_plain(o) and o.untyped_storage()._cdata != address for o in others)

    def recipe_of(self, sources: list[Source], device: str) -> Recipe:
        """Return how to run it again, with `sources` for its tensors."""
        left = iter(sources)

        def source(tensor: torch.Tensor) -> Input:
            return Input(next(left), tensor.requires_grad)

        arguments = [replaced(argument, source) for argument in self.arguments]
        options = {name: replaced(value, source) for name, value in self.options.items()}
        function, casts = self.function, self.may_cast
        return Recipe(function, arguments, options, device, self.draw, casts=casts)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether it is a tensor of PyTorch's own, with strides."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def outputs_of(made: Any) -> Sequence[Any]:
    """Return what a function has made, one by one."""
    return made if type(made) in (tuple, list) else (made,)


def tensors_among(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, those in lists and tuples too."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):  # named tuples, too
            found += tensors_among(argument)
    return found


def _are_values(arguments: Iterable[Any]) -> bool:
    """Tell whether no argument but tensors can change; lists are copied when a recipe is made."""
    for argument in arguments:
        if type(argument) in _VALUES or isinstance(argument, (torch.Tensor, np.generic)):
            continue
        if type(argument) is slice and _are_numbers(argument):
            continue
        if not (isinstance(argument, (list, tuple)) and _are_values(argument)):
            return False
    return True


def _are_numbers(one: slice) -> bool:
    return all(type(part) in (int, type(None)) for part in (one.start, one.stop, one.step))


def replaced(argument: Any, source: Callable[[torch.Tensor], Input]) -> Any:
    """Return an argument with sources in the place of its tensors.

    What is a list or tuple of any kind becomes a plain one, which PyTorch takes as well.
    """
    if isinstance(argument, torch.Tensor):
        return source(argument)
    if isinstance(argument, (list, tuple)):
        plain = list if isinstance(argument, list) else tuple
        return plain(replaced(one, source) for one in argument)
    return argument


def name_of(function: Function) -> str:
    """Return what plans call a function."""
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    name = getattr(function, "_qualified_op_name", None) or getattr(function, "__name__", None)
    return str(name or function)
