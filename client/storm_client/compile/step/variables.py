"""What Python code of a step may decide by besides its arguments: its variables and modules.

Plain values are compared by value, objects by identity. An object is known weakly, so nothing is
kept for having been looked at, and another that takes its address later is another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = ["PLAIN", "are_plain", "attributes", "identified", "is_value", "own", "variables"]

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)

CONTENTS = 64
"""Of a list or table with more than so many things in it, it is not compared what they are."""

Kind = TypeVar("Kind")


class _Same:
    """An object, which only itself is equal to."""

    __slots__ = ("_find",)

    def __init__(self, value: object) -> None:
        """Know `value` weakly, where its type allows that."""
        self._find: Callable[[], object]
        try:
            self._find = weakref.ref(value)
        except TypeError:
            self._find = lambda: value

    def __eq__(self, other: object) -> bool:
        """Tell whether both are the same object, which still lives."""
        if not isinstance(other, _Same):
            return NotImplemented
        mine = self._find()
        return mine is not None and mine is other._find()

    __hash__ = None  # type: ignore[assignment]  # it is compared, and in no table


# --- of functions -------------------------------------------------------------------------------


def variables(step: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of a function's surroundings, plain ones by value, objects by identity.

    Of lists, tables and objects, such as the one whose method it is, what it reads there too, but
    not what lies deeper. Only its own variables, not those of functions that it calls.
    """
    function = getattr(step, "__func__", step)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    found: dict[str, Any] = {}
    for name, value in _surrounding(step):
        _look_at(name, value, names, found)
    for number, value in enumerate(getattr(function, "__defaults__", None) or ()):
        found[f"default {number}"] = identified(value)
    return found


def own(step: Callable[..., Any], kind: type[Kind]) -> list[Kind]:
    """Return a function's variables, and its object's attributes, that are of a kind."""
    found = [value for _, value in _surrounding(step)]
    found += getattr(getattr(step, "__self__", None), "__dict__", {}).values()
    return [one for one in found if isinstance(one, kind)]


def _surrounding(step: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables that are there where a function begins, by name."""
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    if function is not step:
        yield "self", step.__self__  # type: ignore[attr-defined]


_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""What is not looked into."""


def _look_at(name: str, value: object, names: Sequence[str], found: dict[str, Any]) -> None:
    """Note a variable, and those of its attributes that are among `names`."""
    found[name] = identified(value)
    table = getattr(value, "__dict__", None)
    if isinstance(value, (nn.Module, Optimizer, torch.Tensor, *_OPAQUE)) or type(table) is not dict:
        return
    for key in names:
        if key in table:
            found[f"{name}.{key}"] = identified(table[key])


# --- of modules ---------------------------------------------------------------------------------

_EVERY_MODULES = frozenset(nn.Module().__dict__)
"""What any module has: tables, which are looked at one by one, and its mode."""


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, as a dropout's probability; tensors are found by place."""
    return {
        key: identified(value)
        for key, value in module.__dict__.items()
        if key not in _EVERY_MODULES and not isinstance(value, torch.Tensor)
    }


def are_plain(module: nn.Module) -> bool:
    """Tell whether a module's attributes are plain values, of which each is one object for ever."""
    return all(
        isinstance(value, PLAIN)
        for key, value in module.__dict__.items()
        if key not in _EVERY_MODULES
    )


# --- of values ----------------------------------------------------------------------------------


def identified(value: object) -> Any:
    """Return what tells a value from another, or from itself when it holds other things."""
    if type(value) is dict and len(value) <= CONTENTS:
        return dict, [(_alone(key), _alone(one)) for key, one in value.items()]
    if type(value) is list and len(value) <= CONTENTS:
        return list, list(map(_alone, value))
    if isinstance(value, (dict, list)):
        return _Same(value), len(value)
    return _alone(value)


def is_value(value: object) -> bool:
    """Tell whether something is plain, or holds only what is."""
    if isinstance(value, dict):
        return all(map(is_value, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(is_value, value))
    return isinstance(value, PLAIN)


def _alone(value: object) -> Any:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, tuple) and len(value) <= CONTENTS:
        return type(value), tuple(map(_alone, value))
    return _Same(value)
