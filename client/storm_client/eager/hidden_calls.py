"""Maps operator calls that no Python function reports to functions of the table.

There are several sources of such hidden calls. Product kernels copy their arguments. Inside a
function that autocast does not cast for, such as `einsum`, autocast casts the arguments of the
inner operators. Tensor subclasses compute by operators of their own. An attention that no single
kernel computes is made of other operators. The compiled log (`native/call_log.cpp`) reports these
calls after the function that has made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from storm_client.devices import is_capturing
from storm_client.eager.byproducts import byproduct_among
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
    """Yield a hidden call as a known call, then its byproduct; nothing if it is not recomputable.

    A copy that a function has `returned` belongs to that function, and is not yielded.
    """
    if hidden.is_of_attention:
        yield from _inside(hidden)
        return
    known = _hidden_call(hidden.name, hidden.arguments, hidden.made)
    if known is None:
        return
    function, arguments = known
    is_product = function in EXPENSIVE
    is_recorded = hidden.made is returned and not is_product
    if not is_recorded and is_bound(function, arguments, {}):
        yield KnownCall(Call(function, arguments, {}, hidden=hidden), hidden.made, is_product)


def _inside(hidden: HiddenCall) -> Iterator[KnownCall]:
    """Yield the same for a call that is part of an attention."""
    made, draw = hidden.made, hidden.draw
    known = attention_call(hidden.name, hidden.arguments, made)
    if known is None or not is_bound(*known, {}) or (draws(*known, {}) and draw is None):
        return
    if made.is_cuda and is_capturing(made.device):
        return  # the captured graph runs it later, too
    function, arguments = known
    yield KnownCall(Call(function, arguments, {}, draw, hidden=hidden), made, is_timed=True)
    byproduct = byproduct_of(function)
    kept = byproduct_among(hidden.kept, tensors_among((*arguments, made)))
    if byproduct is not None and kept is not None:
        yield KnownCall(Call(byproduct, arguments, {}, draw, hidden=hidden), kept, is_timed=True)


def _hidden_call(
    name: str, arguments: Sequence[Any], made: torch.Tensor
) -> tuple[Function, Sequence[Any]] | None:
    """Return the function of the table for an operator, and its arguments; None if there is none.

    This covers operators inside other operators and those of tensor subclasses. For operators
    inside attentions see `attention_call`.
    """
    if name == "aten::reshape":
        return torch.Tensor.reshape, (arguments[0], made.shape)
    if name == "aten::to":  # perhaps to the dtype that it has already
        return None if made is arguments[0] else (torch.Tensor.to, (arguments[0], made.dtype))
    if name == "aten::mm":
        return torch.mm, arguments
    if name == "aten::_scaled_mm":
        return torch._scaled_mm, (*arguments[:_SCALED_DTYPE], made.dtype, arguments[-1])
    return None


def attention_call(
    name: str, arguments: Sequence[Any], made: torch.Tensor
) -> tuple[Function, Sequence[Any]] | None:
    """Return the same for an operator inside an attention that no single kernel computes."""
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
"""Operators as functions of the table, with the values required of their last arguments, which are
then dropped."""

_SCALED_DTYPE: Final = 6
"""The place of the result's dtype among the arguments of a scaled product."""
