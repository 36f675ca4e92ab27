"""The arguments, writes and results of an operation, by its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["argument", "argument_of", "given", "written"]

aten = torch.ops.aten

_RUNNING_STATISTICS = {
    aten.native_batch_norm,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
}
"""They write to running statistics, which their schemas do not declare."""


def given(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield for each given argument its description in the schema, and its value."""
    for place, described in enumerate(function._schema.arguments):
        if place < len(arguments):
            yield described, arguments[place]
        elif described.name in options:
            yield described, options[described.name]


def argument(node: fx.Node, name: str) -> Any:
    """Return a node's argument of that name; None where it has none."""
    found = given(node.target, node.args, node.kwargs)
    return next((value for described, value in found if described.name == name), None)


def written(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to, by its schema and its flags."""
    found: list[Any] = [
        value
        for described, value in given(function, arguments, options)
        if described.alias_info is not None and described.alias_info.is_write
    ]
    if function.overloadpacket in _RUNNING_STATISTICS:
        named = {one.name: value for one, value in given(function, arguments, options)}
        if named.get("training", named.get("train", True)):
            found += [named.get("running_mean"), named.get("running_var")]
    return [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]


def argument_of(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], alias: Any
) -> Any:
    """Return the argument whose memory a result lies in, by its alias."""
    for described, value in given(function, arguments, options):
        one = described.alias_info
        if one is not None and one.is_write and one.before_set == alias.before_set:
            return value
    raise AssertionError(f"{function} returns what it was not given")
