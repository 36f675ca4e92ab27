"""Calls that no function of Python's is heard of, as functions of the table.

Kernels of products copy what they are given, and inside of functions that it does not cast for, as
`einsum`, autocast casts it for them. Subclasses of tensors compute by operators of their own, and
an attention that no kernel computes as a whole is made of other operators. The compiled log tells
of these (`native/call_log.cpp`), behind the function that has called them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from storm_client.devices import is_capturing
from storm_client.eager.byproducts import kept_among
from storm_client.eager.calls import Call, HiddenCall, tensors_among
from storm_client.eager.operations import EXPENSIVE, Function, byproduct_of, draws, is_bound

__all__ = ["KnownCall", "attention_call", "known_calls"]


class KnownCall(NamedTuple):
    """A hidden call of a function of the table."""

    call: Call
    made: torch.Tensor
    is_timed: bool
    """Whether it may take long enough to be timed."""


def known_calls(hidden: HiddenCall, returned: object) -> Iterator[KnownCall]:
    """Yield what a hidden call is, and what it has kept; nothing if it cannot be recomputed.

    A copy that a function has `returned` is its own.
    """
    if hidden.is_of_attention:
        yield from _inside(hidden)
        return
    known = _hidden_call(hidden.name, hidden.arguments, hidden.made)
    if known is None:
        return
    function, arguments = known
    is_product = function in EXPENSIVE
    is_noted = hidden.made is returned and not is_product
    if not is_noted and is_bound(function, arguments, {}):
        yield KnownCall(Call(function, arguments, {}, hidden=hidden), hidden.made, is_product)


def _inside(hidden: HiddenCall) -> Iterator[KnownCall]:
    """Yield the same of a call that an attention is computed by."""
    made, draw = hidden.made, hidden.draw
    known = attention_call(hidden.name, hidden.arguments, made)
    if known is None or not is_bound(*known, {}) or (draws(*known, {}) and draw is None):
        return
    if made.is_cuda and is_capturing(made.device):
        return  # it runs later, too
    function, arguments = known
    yield KnownCall(Call(function, arguments, {}, draw, hidden=hidden), made, is_timed=True)
    byproduct = byproduct_of(function)
    kept = kept_among(hidden.kept, tensors_among((*arguments, made)))
    if byproduct is not None and kept is not None:
        yield KnownCall(Call(byproduct, arguments, {}, draw, hidden=hidden), kept, is_timed=True)


def _hidden_call(
    name: str, arguments: Sequence[Any], made: torch.Tensor
) -> tuple[Function, Sequence[Any]] | None:
    """Return which function of the table an operator is, and its arguments; None if it is none.

    Of operators inside of others or of what subclasses do. Those inside of attentions are others:
    see `attention_call`.
    """
    if name == "aten::reshape":
        return torch.Tensor.reshape, (arguments[0], made.shape)
    if name == "aten::to":  # perhaps to what it is already
        return None if made is arguments[0] else (torch.Tensor.to, (arguments[0], made.dtype))
    if name == "aten::mm":
        return torch.mm, arguments
    if name == "aten::_scaled_mm":
        return torch._scaled_mm, (*arguments[:_SCALED_DTYPE], made.dtype, arguments[-1])
    return None


def attention_call(
    name: str, arguments: Sequence[Any], made: torch.Tensor
) -> tuple[Function, Sequence[Any]] | None:
    """Return the same of an operator inside of an attention that no kernel computes as a whole."""
    known = _IN_ATTENTION.get(name)
    if known is None:
        return _hidden_call(name, arguments, made)
    function, rest = known
    count = len(arguments) - len(rest)
    return (function, arguments[:count]) if tuple(arguments[count:]) == rest else None


_IN_ATTENTION: Final[dict[str, tuple[Function, tuple[Any, ...]]]] = {
    "aten::_safe_softmax": (torch._safe_softmax, (None,)),
    "aten::add_": (torch.Tensor.add_, (1,)),
    "aten::dropout": (torch.dropout, ()),
    "aten::matmul": (torch.matmul, ()),
    "aten::mul": (torch.mul, ()),
    "aten::repeat_interleave": (torch.repeat_interleave, (None,)),
}
"""Operators as functions of the table, and what their last arguments have to be, left out here."""

_SCALED_DTYPE: Final = 6
"""The place of its result's type among the arguments of a scaled product."""
