"""Finds objects whose next value depends on earlier ones: NumPy's generators, and iterators.

A step that takes from one of them does so only while it is captured, without a trace in what is
recorded. So these objects have to be found from the step's variables and modules. The search only
reads what is stored: it calls nothing, and advances nothing.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from storm_client.step.variables import (
    CONTAINERS,
    compared_variables,
    contents,
    is_plain,
    is_pytorchs,
    names_read,
    own_attributes,
    stored_attributes,
)

__all__ = [
    "NumPyGenerator",
    "generator_of",
    "is_iterator",
    "reachable_from",
    "reachable_from_module",
    "state_of",
]

NumPyGenerator: TypeAlias = np.random.RandomState | np.random.Generator | np.random.BitGenerator

ITEMS = 1_000
"""The most items of one list, tuple, dict, set or deque that are looked at."""

VALUES = 20_000
"""About the most values that are looked at from one start, the nearest first."""


def reachable_from(
    step: Callable[..., Any], arguments: Sequence[object]
) -> Iterator[tuple[str, object]]:
    """Yield what can be reached from a function's variables and arguments, with names."""
    yield from _reachable(compared_variables(step, arguments), names_read(step))


def reachable_from_module(
    module: nn.Module, names: Sequence[str]
) -> Iterator[tuple[str, str, object]]:
    """Yield what can be reached from a module's attributes.

    Each value comes with the attribute and a name. An attribute of the class is one of the
    module's if `names` or the module's `forward` have it.
    """
    read = [*names, *names_read(module.forward)]
    of_class = {} if is_pytorchs(module) else dict(stored_attributes(module, read))
    for key, value in (of_class | own_attributes(module)).items():
        for name, found in _reachable([(key, value)], read):
            yield key, name, found


def is_iterator(value: object) -> bool:
    """Return whether a value is an iterator, which gives another item at each request."""
    return isinstance(value, Iterator) and not isinstance(value, (io.IOBase, type))


def generator_of(value: object) -> NumPyGenerator | None:
    """Return the NumPy generator that a value is or, for NumPy's modules, the global one."""
    if value is np or value is np.random:
        value = np.random.mtrand._rand
    return value if isinstance(value, NumPyGenerator) else None


def state_of(generator: NumPyGenerator) -> str:
    """Return the state of a NumPy generator, and the number of those it has spawned, as text."""
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    spawned = getattr(bits.seed_seq, "n_children_spawned", None)
    return repr((bits.state, spawned))


# --- the search ---------------------------------------------------------------------------------


def _reachable(
    roots: Iterable[tuple[str, object]], names: Sequence[str]
) -> Iterator[tuple[str, object]]:
    """Yield each object that can be reached once, with a name, the nearest first.

    Of objects the search follows the attributes that are among `names`, of modules none.
    """
    waiting, seen, looked_at = deque([iter(roots)]), dict[int, object](), 0
    while waiting and looked_at < VALUES:
        for name, value in waiting.popleft():
            looked_at += 1
            if isinstance(value, torch.Tensor) or is_plain(value) or id(value) in seen:
                continue
            seen[id(value)] = value
            yield name, value
            waiting.append(_members(name, value, names))


def _members(name: str, value: object, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    if isinstance(value, CONTAINERS):
        yield from list(islice(contents(name, value), ITEMS))
    elif isinstance(value, partial):
        bound = (value.func, *value.args, *value.keywords.values())
        yield from ((name, one) for one in bound)
    elif isinstance(value, (MethodType, BuiltinMethodType, MethodWrapperType)):
        yield name, value.__self__
    elif not isinstance(value, (nn.Module, Optimizer, FunctionType)) and not is_pytorchs(value):
        yield from ((f"{name}.{key}", one) for key, one in stored_attributes(value, names))
