"""Numbers of a captured step that differ from run to run: a learning rate, what `.item()` returns.

Python code of a step computes with them as with floats, PyTorch takes them as scalars, and each
operation on them is recorded as one of Python's on doubles. So a run gets the bits that the step
would compute, where tensors in their place would round otherwise.

They are `torch.SymFloat`, with a node of ours behind it. A branch on a number that is known when a
run begins becomes a condition of the captured step; a branch on one that is computed cannot be
captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx.experimental.sym_node  # gives torch.SymFloat its arithmetic
from torch import fx

__all__ = ["Condition", "Number", "evaluate", "number_of", "symbolic"]

STAND_IN = 0.5
"""What operations on fake tensors get for a number: results' shapes depend on none."""

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
    """A branch that the captured step has taken, by what is known when a run begins."""

    node: fx.Node | float | bool
    outcome: bool | float


class Numbers:
    """Records what is computed with numbers in a graph, and what was concluded from them."""

    def __init__(
        self, graph: fx.Graph, note: Callable[[fx.Node], None], refuse: Callable[[], Exception]
    ) -> None:
        """Add nodes to `graph`, and `note` each.

        `refuse` makes the exception for a branch on what is computed.
        """
        self.graph, self.note, self.refuse = graph, note, refuse
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
    """What stands behind a torch.SymFloat or SymBool; its methods are called by PyTorch."""

    def __init__(self, numbers: Numbers, source: fx.Node | float | bool, value: Any) -> None:
        """Stand for a node's value, or a constant; `value` is None for what is yet to come."""
        self.numbers = numbers
        self.source = source
        self.value = value

    def __getattr__(self, name: str) -> Any:
        """Return what records one of the operations of Python's."""
        function = _BINARY.get(name) or _UNARY.get(name) or _COMPARISONS.get(name)
        if function is None:
            raise AttributeError(name)
        return lambda *others: self.numbers.apply(function, self, *others)

    def is_int(self) -> bool:
        return False

    def is_float(self) -> bool:
        return not self.is_bool()

    def is_bool(self) -> bool:
        return isinstance(self.source, bool) or (
            isinstance(self.source, fx.Node) and self.source.target in _COMPARISONS.values()
        )

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def maybe_as_float(self) -> None:
        return None

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_bool(self) -> None:
        return None

    def wrap_float(self, value: float) -> Number:
        return Number(self.numbers, value, value)

    def wrap_int(self, value: int) -> Number:
        return Number(self.numbers, value, value)

    def wrap_bool(self, value: bool) -> Number:
        return Number(self.numbers, value, value)

    def guard_float(self, *_: object) -> float:
        """Return the value as a condition of what was captured.

        Raises:
            UsageError: it is computed by the step.
        """
        return float(self._concluded())

    def guard_int(self, *_: object) -> int:
        return int(self._concluded())

    def guard_bool(self, *_: object) -> bool:
        return bool(self._concluded())

    def bool_(self) -> bool:
        return bool(self._concluded())

    def expect_true(self, *_: object) -> bool:
        return True if self.value is None else bool(self._concluded())

    guard_or_false = guard_or_true = guard_size_oblivious = guard_bool

    def _concluded(self) -> Any:
        if self.value is None:
            raise self.numbers.refuse()
        self.numbers.conditions.append(Condition(self.source, self.value))
        return self.value

    def _graph_repr(self) -> str:
        return str(self.source)

    str = _graph_repr


def symbolic(numbers: Numbers, node: fx.Node, value: float | None) -> Any:
    """Return a node's number as Python code and PyTorch take it."""
    return torch.SymFloat(Number(numbers, node, value))  # type: ignore[no-untyped-call]


def number_of(value: object) -> Number | None:
    """Return what stands behind a value, if it is one of these numbers."""
    node = getattr(value, "node", None) if isinstance(value, torch.SymFloat) else None
    return node if isinstance(node, Number) else None


def evaluate(source: fx.Node | float | bool, known: Mapping[fx.Node, Any]) -> Any:
    """Return what a node comes to where some are known: Python's operations on numbers alone."""
    if not isinstance(source, fx.Node):
        return source
    if source in known:
        return known[source]
    assert callable(source.target)
    return source.target(*(evaluate(one, known) for one in source.args))  # type: ignore[arg-type]
