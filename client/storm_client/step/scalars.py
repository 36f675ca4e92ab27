"""Numbers of a captured step that differ from run to run: a learning rate, a result of `.item()`.

A step's Python code computes with them as with floats, and PyTorch takes them as scalars. Each
operation on them is recorded as a Python operation on doubles. So a run gets the bits that the step
would compute; tensors in their place would round differently.

They are `torch.SymFloat`, with a node of ours behind it. A branch on a number that is known when a
run begins becomes a condition of the captured step. A branch on a computed number cannot be
captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx.experimental.sym_node  # gives torch.SymFloat its arithmetic
from torch import fx

from storm_client.step.refusals import data_dependent

__all__ = ["Condition", "Number", "evaluate", "number_of", "symbolic"]

STAND_IN = 0.5
"""The value that operations on fake tensors get for a number: no result's shape depends on it."""

_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "pow": operator.pow,
    "float_pow": operator.pow,
    "sym_max": max,
    "sym_min": min,
}
_UNARY: dict[str, Callable[..., Any]] = {"neg": operator.neg, "pos": operator.pos}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


class Condition(NamedTuple):
    """A branch that the captured step has taken, on numbers that are known when a run begins."""

    node: fx.Node | float | bool
    outcome: bool | float


class Numbers:
    """Records computations with numbers in a graph, and the branches that were taken on them."""

    def __init__(self, graph: fx.Graph, note: Callable[[fx.Node], None]) -> None:
        """Add nodes to `graph`, and `note` each."""
        self.graph, self.note = graph, note
        self.conditions: list[Condition] = []

    def apply(self, function: Callable[..., Any], *operands: Number) -> Number:
        """Record one operation."""
        values = [one.value for one in operands]
        known = None if None in values else function(*values)
        sources = tuple(one.source for one in operands)
        if not any(isinstance(source, fx.Node) for source in sources):
            assert known is not None
            return Number(self, known, known)
        node = self.graph.call_function(function, sources)
        node.meta["val"] = None
        self.note(node)
        return Number(self, node, known)


class Number:
    """The node behind a torch.SymFloat or SymBool; PyTorch calls its methods."""

    def __init__(self, numbers: Numbers, source: fx.Node | float | bool, value: Any) -> None:
        """Stand for a node's value, or a constant; `value` is None where only a run computes it."""
        self.numbers = numbers
        self.source = source
        self.value = value

    def __getattr__(self, name: str) -> Any:
        """Return a function that records one of Python's operations."""
        function = _BINARY.get(name) or _UNARY.get(name) or _COMPARISONS.get(name)
        if function is None:
            raise AttributeError(name)
        return lambda *others: self.numbers.apply(function, self, *others)

    def is_int(self) -> bool:
        return False

    is_nested_int = is_constant = is_int

    def is_float(self) -> bool:
        return not self.is_bool()

    def is_bool(self) -> bool:
        return isinstance(self.source, bool) or (
            isinstance(self.source, fx.Node) and self.source.target in _COMPARISONS.values()
        )

    def is_symbolic(self) -> bool:
        return True

    def maybe_as_float(self) -> None:
        return None

    maybe_as_int = maybe_as_bool = maybe_as_float

    def wrap_float(self, value: float | bool) -> Number:
        return Number(self.numbers, value, value)

    wrap_int = wrap_bool = wrap_float

    def guard_float(self, *_: object) -> float:
        """Return the value as a condition of the captured step; raise if only a run computes it."""
        return float(self._concluded())

    def guard_int(self, *_: object) -> int:
        return int(self._concluded())

    def guard_bool(self, *_: object) -> bool:
        return bool(self._concluded())

    def expect_true(self, *_: object) -> bool:
        return True if self.value is None else bool(self._concluded())

    bool_ = guard_or_false = guard_or_true = guard_size_oblivious = guard_bool

    def _concluded(self) -> Any:
        if self.value is None:
            raise data_dependent("a number")
        self.numbers.conditions.append(Condition(self.source, self.value))
        return self.value

    def _graph_repr(self) -> str:
        return str(self.source)

    str = _graph_repr


def symbolic(numbers: Numbers, node: fx.Node, value: float | None) -> Any:
    """Return a node's number as the torch.SymFloat that Python code and PyTorch take."""
    return torch.SymFloat(Number(numbers, node, value))  # type: ignore[no-untyped-call]


def number_of(value: object) -> Number | None:
    """Return the `Number` behind a value; None if the value is not one of these numbers."""
    node = getattr(value, "node", None) if isinstance(value, torch.SymFloat) else None
    return node if isinstance(node, Number) else None


def evaluate(source: fx.Node | float | bool, known: Mapping[fx.Node, Any]) -> Any:
    """Return a node's value, computed from `known` ones by Python's operations on numbers alone."""
    if not isinstance(source, fx.Node):
        return source
    if source in known:
        return known[source]
    assert callable(source.target)
    return source.target(*(evaluate(one, known) for one in source.args))  # type: ignore[arg-type]
