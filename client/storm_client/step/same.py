"""Compares two captures of a step, to find what has changed between two calls.

`called.py` and `variables.py` compare what a step's code names. Code may read more than that, as
what C code keeps. So a capture is run again only after a later one has recorded the same. One that
is seen to ask a clock, a file, a queue or an iterator is not run again: its code runs in each call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx

from storm_client.step.captured import Captured, Result
from storm_client.step.nodes import BACKWARD, MICRO_BATCH
from storm_client.step.variables import identified, is_value

__all__ = ["Record"]


class Record:
    """What a capture has recorded, before its graph is divided."""

    def __init__(self, captured: Captured) -> None:
        recording = captured.recording
        self._inputs = list(recording.outside.values())
        nodes = {one.node: f"argument {one.argument}" for one in self._inputs}
        settings = {one.node: (id(one.optimizer), one.group, one.key) for one in captured.settings}
        known, constants = nodes | settings, recording.constants
        self._rows = [
            _Row("a constant", _text(constants[node]), _content(constants[node]))
            if node in constants
            else _Row.of(node, known.get(node))
            for node in recording.graph.nodes
        ]
        self._rows += [
            _Row("a comparison", str(one.node), one.outcome) for one in recording.numbers.conditions
        ]
        places = {key: one.node for key, one in recording.outside.items()}
        self._rows += [
            _of_result(one, places) for one in (*captured.returned, *captured.side_effects)
        ]
        self._rows.append(_Row("its result", str(captured.loop.count), captured.spec))

    def difference(self, inputs: Mapping[fx.Node, Any], later: Record) -> str | None:
        """Return what a later capture has recorded in another way; None if it is the same.

        `inputs` are what a run of this capture would get now.
        """
        for one, other in zip_longest(self._rows, later._rows):
            if one != other:
                return " and then ".join(f"{row.name} {row.text}" for row in (one, other) if row)
        for mine, its in zip(self._inputs, later._inputs, strict=True):
            if its.argument is None and inputs[mine.node] is not its.tensor:
                return f"another tensor of shape {tuple(its.tensor.shape)}"
        return None


class _Row(NamedTuple):
    name: str
    text: str
    more: Any = None

    @classmethod
    def of(cls, node: fx.Node, known: Any) -> _Row:
        place = node.meta.get(BACKWARD), node.meta.get(MICRO_BATCH)
        return cls(str(node.target), f"{node.args}{node.kwargs or ''}", (node.op, place, known))


def _of_result(result: Result, places: Mapping[int, fx.Node]) -> _Row:
    kind, *path = result.path or ("result",)
    names = [str(places.get(id(one), one if type(one) is str else id(one))) for one in path]
    is_constant = result.node is None and is_value(result.value)
    value = identified(result.value) if is_constant else type(result.value)
    return _Row(f"a {kind}", str(result.node or _text(result.value)), (names, value))


def _text(value: Any) -> str:
    """Return a value's text without addresses: each call may make another object of a kind."""
    return f"{re.sub(' at 0x[0-9a-f]+', '', repr(value)):.100}"


def _content(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value._cdata  # of a generator
    return value.dtype, hash(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
