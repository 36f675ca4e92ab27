"""Tells in which layer of a model a tensor is being made or saved, for figures by layer.

The call stack says it: no hook is registered on any module. It is looked at for values that are
new, which are those of the steps that a plan is learned from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch

__all__ = ["MODEL", "NOWHERE", "Layers", "Place", "layer_name", "parts_of"]

MODEL = "(model)"
"""What the model's own forward saves, outside of its layers."""

_CALL = torch.nn.Module._wrapped_call_impl.__code__
"""What every call of a module passes through; its locals are the module and its arguments."""


class Place(NamedTuple):
    """Where in a model something is made."""

    layer: str
    """For figures; empty outside of all modules."""
    path: str
    """The module's qualified name, behind which of several models it is part of."""


NOWHERE: Final = Place("", "")


class Layers:
    """The layers of the modules that an Offload was given, as long as it has those."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Look at the modules when the first question comes; they may be half made now."""
        self.modules = tuple(modules)
        self._places: dict[int, Place] | None = None

    def current(self) -> Place:
        """Return where the forward is that this thread is in."""
        if self._places is None:
            self._places = _places_inside(self.modules)
        if not self._places:
            return NOWHERE
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL:
                place = self._places.get(id(frame.f_locals["self"]))
                if place is not None:
                    return place
            frame = frame.f_back  # type: ignore[assignment]  # None at the end
        return NOWHERE


def parts_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield some modules and all inside of them, each once.

    Every step looks through them before its first kernel, so not by `modules()`, which takes three
    times as long.
    """
    left, met = list(modules), set()
    while left:
        module = left.pop()
        if id(module) not in met:
            met.add(id(module))
            yield module
            if module._modules:
                left += [part for part in module._modules.values() if part is not None]


def _places_inside(roots: Sequence[torch.nn.Module]) -> dict[int, Place]:
    """Return the place of every module in some, by id; which of several it is stands before it."""
    places: dict[int, Place] = {}
    for index, root in enumerate(roots):
        prefix = f"{index}:" if len(roots) > 1 else ""
        for name, module in root.named_modules():
            places.setdefault(id(module), Place(prefix + layer_name(name), prefix + name))
    return places


def layer_name(module: str) -> str:
    """Return the layer that a module of this qualified name is part of.

    That is the name up to its first number, as in "model.layers.3" for "model.layers.3.mlp.up", or
    its first part where it has none.
    """
    if not module:
        return MODEL
    parts = module.split(".")
    for prefix, part in zip(accumulate(parts, "{}.{}".format), parts, strict=True):
        if part.isdecimal():
            return prefix
    return parts[0]
