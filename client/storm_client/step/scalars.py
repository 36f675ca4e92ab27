"""Numbers of a captured step that differ from run to run: a learning rate, a result of `.item()`.

A step's Python code computes with them as with floats, and PyTorch takes them as scalars. Each
operation that gives a float is recorded as a Python operation on doubles. So a run gets the bits
that the step would compute; tensors in their place would round differently.

They are `torch.SymFloat`, with a node of ours behind it. Whatever else Python code asks of one,
such as a comparison or its text, decides by its value. If that is known when a run begins, the
answer becomes a condition of the captured step. If it is computed, the step is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.fx.experimental.sym_node  # gives torch.SymFloat its arithmetic
from torch import fx

from storm_client.step.refusals import data_dependent

__all__ = ["Condition", "Number", "evaluate", "number_of", "recorded", "symbolic"]

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
        is_truth = isinstance(source, bool) or (
            isinstance(source, fx.Node) and source.target in _COMPARISONS.values()
        )
        # An exception crashes the C++ code that asks these, as Ctrl-C is if they run Python code.
        self.is_bool, self.is_float = partial(bool, is_truth), partial(bool, not is_truth)

    def __getattr__(self, name: str) -> Any:
        """Return a function that records one of Python's operations, for PyTorch."""
        function = _BINARY.get(name) or _UNARY.get(name) or _COMPARISONS.get(name)
        if function is None:
            raise AttributeError(name)
        return lambda *others: self.numbers.apply(function, self, *others)

    is_int = is_nested_int = is_constant = staticmethod(partial(bool, False))
    is_symbolic = staticmethod(partial(bool, True))

    def maybe_as_float(self) -> None:
        return None

    maybe_as_int = maybe_as_bool = maybe_as_float

    def wrap_float(self, value: float | bool) -> Number:
        return Number(self.numbers, value, value)

    wrap_int = wrap_bool = wrap_float

    def guard_float(self, *_: object) -> float:
        return float(self.concluded())

    def guard_int(self, *_: object) -> int:
        return int(self.concluded())

    def guard_bool(self, *_: object) -> bool:
        return bool(self.concluded())

    def expect_true(self, *_: object) -> bool:
        return True if self.value is None else bool(self.concluded())

    bool_ = guard_or_false = guard_or_true = guard_size_oblivious = guard_bool

    def concluded(self) -> Any:
        """Return the value as a condition of the captured step; raise if only a run computes it."""
        if self.value is None:
            raise data_dependent("a number")
        self.numbers.conditions.append(Condition(self.source, self.value))
        return self.value

    def _graph_repr(self) -> str:
        return str(self.source)

    str = _graph_repr


class _SymFloat(torch.SymFloat):
    """What Python code gets: `isinstance` takes it for a float, and it has all methods of a float.

    PyTorch asks for its real type.
    """

    __class__ = property(lambda _: float)
    __array_ufunc__ = None
    node: Number

    def __init__(self, node: Number) -> None:
        super().__init__(node)  # type: ignore[no-untyped-call]

    real = property(lambda self: self)
    imag = property(lambda _: 0.0)

    def conjugate(self) -> _SymFloat:
        return self

    __pos__ = __copy__ = __sym_float__ = conjugate

    def __deepcopy__(self, _: object) -> _SymFloat:
        return self

    def __reduce_ex__(self, _: object) -> tuple[type, tuple[float]]:
        return float, (self.node.guard_float(),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Decide by the value: NumPy would compute with objects, in another order."""
        return np.array(self.node.guard_float(), dtype)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        if digits is None:
            return round(self.node.guard_float())
        numbers = self.node.numbers
        return _SymFloat(numbers.apply(round, self.node, Number(numbers, digits, digits)))


def _recorded(function: Callable[..., Any], *, is_reflected: bool = False) -> Any:
    """Return a method that records an operation which gives a float."""

    def method(self: _SymFloat, *others: object) -> Any:
        operands = _operands(self, others)
        if operands is None:
            return NotImplemented
        ordered = reversed(operands) if is_reflected else operands
        return _SymFloat(self.node.numbers.apply(function, *ordered))

    return method


def _decided(function: Callable[..., Any]) -> Any:
    """Return a method whose answer becomes a condition; it raises if only a run computes it."""

    def method(self: _SymFloat, *others: object) -> Any:
        operands = _operands(self, others)
        if operands is None:
            return NotImplemented
        return self.node.numbers.apply(function, *operands).concluded()

    return method


def _asked(name: str) -> Any:
    """Return the method of that name that the number's value has."""
    function = getattr(float, name)
    return lambda self, *arguments: function(self.node.guard_float(), *arguments)


def _operands(number: _SymFloat, others: Sequence[object]) -> list[Number] | None:
    """Return the operands of an operation, which are all numbers of Python's; None elsewhere."""
    found = [number.node]
    for other in others:
        known = number_of(other)
        if known is None and type(other) not in (bool, int, float):
            return None
        found.append(known or Number(number.node.numbers, other, other))  # type: ignore[arg-type]
    return found


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(_SymFloat, f"__{_name}__", _recorded(_function))
    setattr(_SymFloat, f"__r{_name}__", _recorded(_function, is_reflected=True))
for _name, _function in (
    ("__neg__", operator.neg),
    ("__abs__", operator.abs),
    ("__sym_max__", max),
    ("__sym_min__", min),
):
    setattr(_SymFloat, _name, _recorded(_function))
for _name, _function in _COMPARISONS.items():
    setattr(_SymFloat, f"__{_name}__", _decided(_function))
_SymFloat.__bool__ = _decided(operator.truth)  # type: ignore[method-assign]
for _name in (
    "__ceil__",
    "__float__",
    "__floor__",
    "__format__",
    "__hash__",
    "__int__",
    "__repr__",
    "__trunc__",
    "as_integer_ratio",
    "hex",
    "is_integer",
):
    setattr(_SymFloat, _name, _asked(_name))


def recorded(function: Callable[..., Any], *operands: Any) -> Any:
    """Return what `function` computes of floats, recorded if any is a number of a step."""
    first = next((one for one in operands if number_of(one) is not None), None)
    if first is None:
        return function(*operands)
    numbers = first.node.numbers
    given = [number_of(one) or Number(numbers, one, one) for one in operands]
    return _SymFloat(numbers.apply(function, *given))


def symbolic(numbers: Numbers, node: fx.Node, value: float | None) -> Any:
    """Return a node's number as the torch.SymFloat that Python code and PyTorch take."""
    return _SymFloat(Number(numbers, node, value))


def as_float(value: Any) -> Any:
    """Return a number that PyTorch has returned as Python code takes it; anything else as it is."""
    number = number_of(value)
    return value if number is None else _SymFloat(number)


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
