"""Which arguments of an operation are written to or returned, as its schema says."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["argument_of", "written"]

aten = torch.ops.aten

_RUNNING_STATISTICS = {
    aten.native_batch_norm,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
}
"""They write to running statistics, and their schemas do not say so."""


def written(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to, by its schema and its flags."""
    found: list[Any] = []
    for described, value in _described(function, arguments, options):
        alias = described.alias_info
        if alias is not None and alias.is_write:
            found.append(value)
    if function.overloadpacket in _RUNNING_STATISTICS:
        described = _described(function, arguments, options)
        named = {one.name: value for one, value in described}
        if named.get("training", named.get("train", True)):
            found += [named.get("running_mean"), named.get("running_var")]
    return [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]


def _described(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return what a schema says of each argument that was given, with it."""
    for place, described in enumerate(function._schema.arguments):
        if place < len(arguments):
            yield described, arguments[place]
        elif described.name in options:
            yield described, options[described.name]


def argument_of(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], alias: Any
) -> Any:
    """Return the argument whose memory a result lies in, by its alias."""
    for described, value in _described(function, arguments, options):
        given = described.alias_info
        if given is not None and given.is_write and given.before_set == alias.before_set:
            return value
    raise AssertionError(f"{function} returns what it was not given")
