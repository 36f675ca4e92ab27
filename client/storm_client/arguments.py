"""What `offload` takes, and what to say to whoever passes something else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from storm_client.eager.plan_maker import PlanOptions
from storm_client.errors import UsageError
from stormd.protocol import BUDGET_VARIABLE, CODECS, parse_budget
from stormd.protocol.sizes import parse_size

__all__ = [
    "Layer",
    "Modules",
    "check_codec",
    "check_loss",
    "check_options",
    "layers_of",
    "modules_of",
    "plan_options",
    "size_of",
]

Modules = torch.nn.Module | Iterable[torch.nn.Module] | None
Layer = torch.nn.Module | type[torch.nn.Module] | str
"""A module, all modules of a class, or the module of a qualified name."""


def modules_of(model: Modules) -> list[torch.nn.Module]:
    """Return the modules that were passed.

    Raises:
        UsageError: something else was.
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
    """Check the names of options of `offload`, which are `known`.

    Raises:
        UsageError: one is no option of it; it may be one of connect(), which are `of_connect`.
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
    """Return the bytes of a size that was passed as `name`: a whole number, or a text as "1MiB".

    Raises:
        UsageError: it is no size.
    """
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error
    raise UsageError(f"{name} is {value!r}; pass a number of bytes, or a size as '1MiB'")


def check_codec(codec: str) -> None:
    """Check how tensors are to be encoded.

    Raises:
        UsageError: a value that cannot be.
    """
    if codec not in CODECS:
        raise UsageError(f"codec is {codec!r}; choose one of {', '.join(CODECS)}")


def check_loss(loss: str) -> None:
    """Check how losses are to be computed.

    Raises:
        UsageError: a value that cannot be.
    """
    if loss not in _LOSSES:
        raise UsageError(f"loss is {loss!r}; choose {' or '.join(map(repr, _LOSSES))}")


def plan_options(
    budget: str | float | None,
    verify: str,
    replay: bool | Iterable[Callable[..., Any]],
) -> PlanOptions:
    """Return what was asked of the plan; a `budget` of None is STORMD_BUDGET's.

    Raises:
        UsageError: a value that none of them takes.
    """
    if budget is None:
        budget = os.environ.get(BUDGET_VARIABLE) or "least"
    try:
        parsed = parse_budget(budget)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if verify not in _VERIFY:
        raise UsageError(f"verify is {verify!r}; choose {' or '.join(_VERIFY)}")
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
    """Return the modules that `layers` names among all that some modules have, each once.

    A list of modules stands for its items: it is not called itself.

    Raises:
        UsageError: something is no module, or names none of these.
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
    """Return what one of `layers` names; `inside` has the model's modules by name."""
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
    """Yield what PyTorch may call a function by: an operator is known as a packet of overloads."""
    yield function
    if isinstance(function, CustomOpDef):
        function = function._opoverload
    if isinstance(function, torch._ops.OpOverload):
        yield from (function, function.overloadpacket)
    elif isinstance(function, torch._ops.OpOverloadPacket):
        yield from (getattr(function, name) for name in function.overloads())  # type: ignore[no-untyped-call]


_VERIFY = ("learn", "always")
_LOSSES = ("tiled", "plain")

_LAYERS = (
    "pass modules of the model, as in layers=model.blocks, their class, or names that "
    "model.named_modules() has"
)

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


_WANTED = (
    "pass the module, or a list of modules, whose parameters are to stay, or nothing, and options "
    "by name"
)


def _shown(value: object) -> str:
    """Return a number or word as it is, and of anything else the type."""
    if isinstance(value, type):
        return f"class {value.__name__}"
    name = type(value).__name__
    return f"{name} {value!r}" if isinstance(value, (int, float, str)) else name
