"""Symbolic sizes, which the backward graph computes from the symbols that it is given.

A forward graph's sizes may be expressions. An example is the row count of attention's log-sum-exp,
rounded up to a multiple of 32: ceil(n / 32) * 32. They are computed in integers, so that no
floating-point rounding occurs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["can_compute", "computed", "symbols_of"]


def symbols_of(graph: fx.Graph) -> dict[Any, fx.Node]:
    """Return the placeholders that carry symbols of shapes, by symbol."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found[value.node.expr] = node
    return found


def can_compute(sizes: Iterable[int | torch.SymInt], symbols: Mapping[Any, fx.Node]) -> bool:
    """Return whether `computed` can compute all `sizes`, by trying it in a graph of its own."""
    scratch = fx.Graph()
    copies = {symbol: scratch.node_copy(node) for symbol, node in symbols.items()}
    try:
        for size in sizes:
            computed(size, scratch, copies)
    except Exception:  # noqa: BLE001 - sympy and fx have many of their own for what they cannot do
        return False
    return True


def computed(size: int | torch.SymInt, graph: fx.Graph, symbols: Mapping[Any, fx.Node]) -> Any:
    """Return a size for `graph`: a number, or a node that computes it at the insertion point.

    `symbols` are nodes of that graph.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    found: fx.Node = sympy_interp(_InGraph, proxies, expression).node
    _value_of(found)
    return found


class _Quotient(NamedTuple):
    """A quotient that is yet to be rounded."""

    above: Any
    below: Any


class _InGraph(PythonReferenceAnalysis):
    """Makes fx record the integer operations that Python would run."""

    @staticmethod
    def int_truediv(above: Any, below: Any) -> _Quotient:
        return _Quotient(above, below)

    @staticmethod
    def ceil_to_int(quotient: _Quotient, _: object) -> Any:
        return -(-quotient.above // quotient.below)

    @staticmethod
    def floor_to_int(quotient: _Quotient, _: object) -> Any:
        return quotient.above // quotient.below


def _value_of(node: fx.Node) -> Any:
    """Return the value of a node that computes sizes, and note it where it is missing."""
    if "val" not in node.meta:
        arguments, options = fx.map_arg((node.args, node.kwargs), _value_of)
        assert callable(node.target)
        node.meta["val"] = node.target(*arguments, **options)
    return node.meta["val"]
