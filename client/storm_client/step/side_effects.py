"""Finds side effects that a step's capture has left in Python objects, and undoes them.

Only the capture would change a meter that sums losses up, a list deep in a dict or a scheduler that
counts, and would leave tensors without memory there. Such a step is refused, and the objects are
reset. Variables that count are refused, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from storm_client.errors import UsageError
from storm_client.step.recording import is_of_a_capture
from storm_client.step.variables import (
    CONTAINERS,
    PLAIN,
    compared_variables,
    contents,
    is_pytorchs,
    variables,
)

__all__ = ["Objects"]

DEPTH = 6
"""The most references from a variable to an object that is still looked at."""

MOST = 20_000
"""The most objects that are looked at in all."""


class Objects:
    """A step's variables, and the lists, dicts and objects that can be reached from them."""

    def __init__(self, step: Callable[..., Any], arguments: Sequence[object]) -> None:
        self._step, self._arguments = step, arguments
        self._variables = variables(step, arguments)
        self._before = [
            (held, held.copy())
            for _, held in self._everything()
            if type(held) in (dict, list, set, deque)
        ]

    def check(self) -> None:
        """Raise UsageError if the capture has changed what a run would not change."""
        now = variables(self._step, self._arguments)
        changed = [name for name in now if self._variables.get(name) != now[name]]
        if changed:
            raise UsageError(
                f"the step changes its variable {changed[0]!r}, but its Python code runs only "
                "when it is captured; return the value, and leave counting to what calls the step"
            )
        left = self.first(is_of_a_capture)
        if left is not None:
            raise UsageError(
                f"the step leaves what it computes in {left!r}, in which a run could not put its "
                "own; return it, and keep it in what calls the step"
            )

    def put_back(self) -> None:
        """Reset each container that holds values of the capture; other threads may use the rest."""
        for held, before in self._before:
            inside = [one for value in _values(held) for one in (value, *_values(value))]
            if any(map(is_of_a_capture, inside)):
                held.clear()
                held.update(before) if isinstance(held, (dict, set)) else held.extend(before)

    def first(self, is_left: Callable[[object], bool]) -> str | None:
        """Return the name of the first value for which `is_left` is true, or None."""
        return next((name for name, value in self._everything() if is_left(value)), None)

    def _everything(self) -> Iterator[tuple[str, Any]]:
        """Yield each value that can be reached once, with a name, the nearest first."""
        waiting = deque(
            (name, value, 0) for name, value in compared_variables(self._step, self._arguments)
        )
        seen: dict[int, object] = {}
        while waiting and len(seen) < MOST:
            name, value, depth = waiting.popleft()
            if isinstance(value, PLAIN) or id(value) in seen:
                continue
            seen[id(value)] = value
            yield name, value
            if depth < DEPTH:
                waiting.extend((one, held, depth + 1) for one, held in _held(name, value))


def _held(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, CONTAINERS):
        yield from contents(name, value)
    elif (table := _table_of(value)) is not None:
        yield f"{name}.__dict__", table
        yield from ((f"{name}.{key}", one) for key, one in table.items())


def _values(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    return list(value) if isinstance(value, (list, tuple, deque, set, frozenset)) else []


def _table_of(value: object) -> dict[str, Any] | None:
    if isinstance(value, (nn.Module, Optimizer, torch.Tensor, ModuleType)):
        return None
    if is_pytorchs(value) and not isinstance(value, LRScheduler):
        return None
    table = getattr(value, "__dict__", None)
    return table if type(table) is dict else None
