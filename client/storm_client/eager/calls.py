"""Describes a call that has run: its function, which arguments are tensors, which may change."""

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
    from storm_client.eager.tracked import TrackedStorage
    from storm_client.native import _follow

__all__ = ["Call", "HiddenCall", "is_plain", "name_of", "outputs_of", "replaced", "tensors_among"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_VALUES = (
    type(None), type(...), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
"""Types of immutable arguments."""


class HiddenCall(NamedTuple):
    """An operator call that no Python function reports; native/call_log.cpp reports it instead."""

    name: str
    arguments: list[Any]
    made: torch.Tensor
    is_of_attention: bool
    """Whether it is part of an attention, or casts an argument of one: autocast is off there."""
    draw: _follow.Draw | None
    """The random numbers that it has drawn; None for none, and where they cannot be recorded."""
    kept: list[torch.Tensor]
    """The tensors saved while it drew."""
    version: int
    """The version of `made` right after the call; later calls may have overwritten the tensor."""
    entry: int
    """Its index in the log; -1 where the log has not recorded it."""


class Call:
    """A function call that has run, with its arguments."""

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
        former: Sequence[TrackedStorage | None] = (),
        hidden: HiddenCall | None = None,
    ) -> None:
        """`draw` holds the random numbers that the call has drawn; None for none.

        `former` holds the values that a launch has overwritten, which are its first tensors; None
        for an unknown one. `hidden` is the logged call if no Python function has reported it.
        """
        self.draw = draw
        self.former = former
        self.hidden = hidden
        self.function = function
        self.arguments = arguments
        self.options = options
        self.recipe: Recipe | None = None
        """The recipe of all its results, once one of them is to be recomputed."""
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
        """Whether the function is a Triton kernel, which does not allocate its results itself."""
        return isinstance(self.function, Kernel)

    @property
    def is_byproduct(self) -> bool:
        """Whether it makes the byproduct of another call."""
        return isinstance(self.function, Byproduct)

    @property
    def reads_layout(self) -> bool:
        """Whether its result depends on the layout of its tensors, but not on their contents."""
        return isinstance(self.function, Byproduct) and self.function.depends is Depends.LAYOUT

    @property
    def version(self) -> int | None:
        """The version of its result right after the call; None for the present version."""
        return None if self.hidden is None or self.is_byproduct else self.hidden.version

    @property
    def entry(self) -> int:
        """Its index in the log; -1 stands for the result of the function that has just run."""
        return -1 if self.hidden is None else self.hidden.entry

    @property
    def may_cast(self) -> bool:
        """Whether autocast, if it is on, has cast the arguments."""
        return self.hidden is None or not self.hidden.is_of_attention

    def is_fixed(self) -> bool:
        """Return whether all of its arguments that are not tensors are immutable values."""
        return _are_values(self.arguments) and _are_values(self.options.values())

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is that of an argument."""
        address = storage._cdata
        return any(
            is_plain(tensor) and tensor.untyped_storage()._cdata == address
            for tensor in self.tensors()
        )

    def brings(self, output: torch.Tensor) -> bool:
        """Return whether an output without a gradient comes from another device.

        A batch is sent to the GPU once: it is stored rather than sent again in the backward pass.
        """
        return not output.requires_grad and any(
            tensor.dim() > 0 and tensor.device != output.device for tensor in self.tensors()
        )

    def overwrites(self, output: Any) -> bool:
        """Return whether an output is its first argument and shares memory with no other argument.

        False for views, since the rest of their storage is not written to. True for `FORMER`: the
        copy of an argument's former contents is recomputed like such an output.
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
        """Return a recipe that runs the call again, with `sources` for its tensors."""
        left = iter(sources)

        def source(tensor: torch.Tensor) -> Input:
            return Input(next(left), tensor.requires_grad)

        arguments = [replaced(argument, source) for argument in self.arguments]
        options = {name: replaced(value, source) for name, value in self.options.items()}
        function, casts = self.function, self.may_cast
        return Recipe(function, arguments, options, device, self.draw, casts=casts)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether it is a tensor of PyTorch's own class, with strides."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def outputs_of(made: Any) -> Sequence[Any]:
    """Return the outputs of a function as a sequence."""
    return made if type(made) in (tuple, list) else (made,)


def tensors_among(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among arguments, including those in lists and tuples."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):  # named tuples, too
            found += tensors_among(argument)
    return found


def _are_values(arguments: Iterable[Any]) -> bool:
    """Return whether all arguments but tensors are immutable; a recipe copies lists when made."""
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
    """Return an argument with its tensors replaced by sources.

    Subclasses of list and tuple become plain lists and tuples, which PyTorch accepts as well.
    """
    if isinstance(argument, torch.Tensor):
        return source(argument)
    if isinstance(argument, (list, tuple)):
        plain = list if isinstance(argument, list) else tuple
        return plain(replaced(one, source) for one in argument)
    return argument


def name_of(function: Function) -> str:
    """Return the name of a function as plans show it."""
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    name = getattr(function, "_qualified_op_name", None) or getattr(function, "__name__", None)
    return str(name or function)
