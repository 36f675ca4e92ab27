"""What `offload` takes, and what to say to whoever passes something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import torch

from storm_client.errors import UsageError

__all__ = ["Modules", "check_options", "modules_of"]

Modules = torch.nn.Module | Iterable[torch.nn.Module] | None


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


def check_options(given: Iterable[str]) -> None:
    """Check the names of options of `offload`.

    Raises:
        UsageError: one is no option of it; it may be one of connect().
    """
    # Both use this module; their signatures are where options are defined.
    from storm_client.client import Client
    from storm_client.connect import connect

    known = _options(Client.offload)
    for name in given:
        if name in known:
            continue
        if name in inspect.signature(connect).parameters:
            raise UsageError(
                f"{name} is an option of connect(): write client = storm_client.connect({name}=...)"
                " and client.offload(model)"
            )
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? K" if near else "k"
        raise UsageError(f"offload() has no option {name!r}: {hint}nown are {', '.join(known)}")


def _options(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]


_WANTED = (
    "pass the module, or a list of modules, whose parameters are to stay, or nothing, and options "
    "by name"
)


def _shown(value: object) -> str:
    """Return a number or word as it is, and of anything else the type."""
    name = type(value).__name__
    return f"{name} {value!r}" if isinstance(value, (int, float, str)) else name
