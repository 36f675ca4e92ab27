"""Validates the arguments of `offload` and raises a UsageError for a wrong one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch._library.custom_ops import CustomOpDef

from storm_client.eager.plan_maker import PlanOptions
from storm_client.errors import UsageError
from stormd.protocol import BUDGET_VARIABLE, parse_budget
from stormd.protocol.sizes import parse_size

__all__ = [
    "Layer",
    "Modules",
    "check_choice",
    "check_options",
    "layers_of",
    "modules_of",
    "plan_options",
    "size_of",
]

Modules = torch.nn.Module | Iterable[torch.nn.Module] | None
Layer = torch.nn.Module | type[torch.nn.Module] | str
"""A module, a class (all modules of the class), or a module's qualified name."""


def modules_of(model: Modules) -> list[torch.nn.Module]:
    """Return the modules in the argument as a list.

    Raises:
        UsageError: the argument is neither a module nor an iterable of modules.
    """
    if model is None:
        return []
    if isinstance(model, torch.nn.Module):
        return [model]
    if not isinstance(model, Iterable) or isinstance(model, (str, bytes, torch.Tensor)):
        raise UsageError(f"offload() got {_shown(model)}; {_WANTED}")
    modules = list(model)
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"offload() got {_shown(module)} among its modules; {_WANTED}")
    return modules


def check_options(given: Iterable[str], known: Sequence[str], of_connect: Sequence[str]) -> None:
    """Check that each name in `given` is an option of `offload`; `known` has these options.

    Raises:
        UsageError: a name is not an option of offload(). The message tells if the name is in
            `of_connect`, the options of connect().
    """
    for name in given:
        if name in known:
            continue
        if name in of_connect:
            raise UsageError(
                f"{name} is an option of connect(): write client = storm_client.connect({name}=...)"
                " and client.offload(model)"
            )
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? K" if near else "k"
        raise UsageError(f"offload() has no option {name!r}: {hint}nown are {', '.join(known)}")


def size_of(value: int | str, name: str) -> int:
    """Return a size in bytes; `value` is a whole number or a text such as "1MiB".

    Raises:
        UsageError: `value` is not a size. The message calls the argument `name`.
    """
    value = _plain(value)
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    raise UsageError(f"{name} is {value!r}; pass a number of bytes, or a size as '1MiB'")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Check that `value` is one of the `choices` for the argument `name`.

    Raises:
        UsageError: it is not.
    """
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; choose {' or '.join(choices)}")


def plan_options(
    budget: str | float | None,
    verify: str,
    replay: bool | Iterable[Callable[..., Any]],
) -> PlanOptions:
    """Return the options of the plan; a `budget` of None means the value of STORMD_BUDGET.

    Raises:
        UsageError: an argument has an invalid value.
    """
    if budget is None:
        budget = os.environ.get(BUDGET_VARIABLE) or "least"
    try:
        parsed = parse_budget(_plain(budget))
    except ValueError as error:
        raise UsageError(str(error)) from error
    check_choice("verify", verify, ("learn", "always"))
    if isinstance(replay, bool):
        return PlanOptions(parsed, verify == "always", replay)
    several = isinstance(replay, Iterable) and not isinstance(replay, str)
    functions: list[Any] = list(replay) if several else [replay]
    for function in functions:
        if not callable(function):
            raise UsageError(
                f"replay has {_shown(function)}; pass True, False or a list of functions"
            )
    spelled = frozenset(chain.from_iterable(map(_spellings, functions)))
    return PlanOptions(parsed, verify == "always", True, spelled)


def layers_of(layers: Any, modules: Iterable[torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    """Return the modules inside `modules` that `layers` names, each once.

    A ModuleList or ModuleDict stands for its items, because PyTorch does not call the container.

    Raises:
        UsageError: an entry of `layers` is not a layer, or names no module inside `modules`.
    """
    inside = {name: part for module in modules for name, part in module.named_modules()}
    is_one = isinstance(layers, (str, type)) or not isinstance(layers, Iterable)
    named = [found for one in ([layers] if is_one else layers) for found in _named(one, inside)]
    called = [
        item
        for module in named
        for item in (module.children() if isinstance(module, _CONTAINERS) else [module])
    ]
    return tuple(dict.fromkeys(called))


def _named(layer: Any, inside: Mapping[str, torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the modules that one entry of `layers` names; `inside` has the model's, by name."""
    parts = inside.values()
    if isinstance(layer, str):
        found = [inside[layer]] if layer in inside else []
        hint = _near(layer, inside)
    elif isinstance(layer, type) and issubclass(layer, torch.nn.Module):
        found = [part for part in parts if isinstance(part, layer)]
        hint = _near(layer.__name__, (type(part).__name__ for part in parts))
    elif isinstance(layer, torch.nn.Module):
        found = [layer] if not inside or any(layer is part for part in parts) else []
        hint = ""
    else:
        raise UsageError(f"layers has {_shown(layer)}; {_LAYERS}")
    if not found:
        raise UsageError(
            f"layers has {_shown(layer)}, which the model does not have{hint}; {_LAYERS}"
        )
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, dict.fromkeys(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _spellings(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the objects by which PyTorch may call a function: an operator has several overloads."""
    yield function
    if isinstance(function, CustomOpDef):
        function = function._opoverload
    if isinstance(function, torch._ops.OpOverload):
        yield from (function, function.overloadpacket)
    elif isinstance(function, torch._ops.OpOverloadPacket):
        yield from (getattr(function, name) for name in function.overloads())  # type: ignore[no-untyped-call]


def _plain(value: Any) -> Any:
    """Return a number of NumPy as Python's: sizes and fractions are often computed with NumPy."""
    return value.item() if isinstance(value, np.generic) else value


_LAYERS = (
    "pass modules of the model, as in layers=model.blocks, their class, or names that "
    "model.named_modules() has"
)

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


_WANTED = (
    "pass the module, or a list of modules, whose parameters are to be kept on the device, or "
    "nothing, and options by name"
)


def _shown(value: object) -> str:
    """Return a number, string or class as text; for any other value, return its type's name."""
    if isinstance(value, type):
        return f"class {value.__name__}"
    name = type(value).__name__
    return f"{name} {value!r}" if isinstance(value, (int, float, str)) else name
