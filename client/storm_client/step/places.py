"""Notes what Python objects hold before a capture, to find and take out what the capture leaves.

Only the capture would change a meter that sums losses up, a list deep in a dict or a scheduler that
counts, and would leave tensors without memory there. Such a step is refused. What has got something
of the capture's is reset to what it held; other threads may use the rest meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from storm_client.errors import UsageError
from storm_client.step.recording import is_of_a_capture
from storm_client.step.variables import is_plain, is_pytorchs, own_attributes, table_of, text_of

__all__ = ["Places", "held_by", "put_back"]

DEPTH = 6
"""The most references from a variable to an object that is still looked at."""

MOST = 20_000
"""The most objects that are looked at in all."""

_SEQUENCES = (list, deque, tuple)
_SETS = (set, frozenset)


class Places:
    """Objects, and what each held when it was noted."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any, dict[Any, Any]]] = {}
        """By id, with a name."""

    def note(self, roots: Iterable[tuple[str, Any]], depth: int = DEPTH) -> None:
        """Note all that some values lead to by so many references, the nearest first."""
        waiting = deque((name, value, depth) for name, value in roots)
        while waiting and len(self._known) < MOST:
            name, value, depth = waiting.popleft()
            table = None if id(value) in self._known else held_by(value)
            if table is None:
                continue
            self._known[id(value)] = name, value, table
            if depth and not isinstance(value, ModuleType):
                held = table.items()
                waiting.extend((_of(name, value, key), one, depth - 1) for key, one in held)

    def check(self) -> None:
        """Raise UsageError if something of a capture's is in one of the places."""
        for name, held, before in self._known.values():
            left = self._left_in(held, before)
            if left:
                raise UsageError(
                    f"the step leaves what it computes in {_of(name, held, left[0])!r}, in which a "
                    "run could not put its own; return it, and keep it in what calls the step"
                )

    def put_back(self) -> None:
        """Reset the places that hold something of a capture's."""
        for _, held, before in self._known.values():
            if self._left_in(held, before):
                put_back(held, before)

    def _left_in(self, held: Any, before: dict[Any, Any]) -> list[Any]:
        known = set(map(id, before.values()))
        now = held_by(held) or {}
        return [key for key, one in now.items() if id(one) not in known and self.is_left(one)]

    def is_left(self, value: object) -> bool:
        """Return whether a value is of a capture, or leads to one by what was not noted."""
        waiting, seen = [value], dict[int, object]()
        while waiting and len(seen) < MOST:
            one = waiting.pop()
            if is_of_a_capture(one):
                return True
            if id(one) not in seen and id(one) not in self._known:
                seen[id(one)] = one
                waiting.extend((held_by(one) or {}).values())
        return False


def held_by(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds, or an object's own attributes, without running its code.

    None for what is not looked into.
    """
    if is_plain(value) or is_of_a_capture(value) or isinstance(value, _NOT_LOOKED_INTO):
        return None
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, (*_SEQUENCES, *_SETS)):
        return dict(enumerate(value))
    if isinstance(value, np.ndarray):
        return dict(enumerate(value.flat)) if value.dtype == object else None
    if isinstance(value, nn.Module):
        return own_attributes(value) | value._modules
    is_internal = is_pytorchs(value) and not isinstance(value, _LOOKED_INTO)
    return None if is_internal else _attributes(value)


_NOT_LOOKED_INTO = (Optimizer, BuiltinFunctionType, torch.jit.ScriptModule)
_LOOKED_INTO = (
    LRScheduler,
    torch.amp.GradScaler,
    torch.distributions.Distribution,
    torch.Tensor,
    FunctionType,
    CellType,
)
"""Types of PyTorch's and Python's that are."""


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, CellType):
        has_contents = value != CellType()
        return {"cell_contents": value.cell_contents} if has_contents else {}
    found = dict(table_of(value) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__ if "__slots__" in kind.__dict__ else {}
        for name, one in slots.items():
            if isinstance(one, MemberDescriptorType):
                with suppress(AttributeError):  # it is not set
                    found[name] = one.__get__(value)
    return found


def put_back(held: Any, before: dict[Any, Any]) -> None:
    """Make a container or an object hold what it held before; what has not changed is left alone.

    Of containers the builtin methods are called: a subclass may refuse or alter changes. Modules of
    PyTorch's are put back with their tables.
    """
    if isinstance(held, (dict, *_SEQUENCES, *_SETS)) and _holds(held, before):
        return
    if isinstance(held, (list, deque)):
        sequence = list if isinstance(held, list) else deque
        sequence.clear(held)
        sequence.extend(held, before.values())  # type: ignore[arg-type]
    elif isinstance(held, set):
        set.clear(held)
        set.update(held, before.values())
    elif isinstance(held, dict):
        table = OrderedDict if isinstance(held, OrderedDict) else dict
        table.clear(held)
        for key, one in before.items():
            table.__setitem__(held, key, one)
    elif not isinstance(held, (nn.Module, tuple, frozenset)):
        owner = type if isinstance(held, type) else object
        now = held_by(held) or {}
        for key in now.keys() - before.keys():
            owner.__delattr__(held, key)
        for key, one in before.items():
            if now.get(key) is not one:
                owner.__setattr__(held, key, one)


def _holds(container: Any, before: dict[Any, Any]) -> bool:
    """Return whether a container has the same items as before, in the same order."""
    now = held_by(container) or {}
    same = (one is other for one, other in zip(now.values(), before.values(), strict=False))
    return list(now) == list(before) and all(same)


def _of(name: str, held: object, key: object) -> str:
    is_container = isinstance(held, (dict, *_SEQUENCES, *_SETS))
    return f"{name}[{text_of(key):.40}]" if is_container else f"{name}.{key}"
