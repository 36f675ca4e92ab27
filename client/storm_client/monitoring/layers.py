"""Finds the layer of a model in which a tensor is made or saved, for figures by layer.

The layer is read from the call stack: no hook is registered on any module. This is done for new
values only, which occur in the steps that a plan is learned from.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from storm_client.planner.blocks import numbered_layers

__all__ = ["MODEL", "NOWHERE", "Layers", "Place", "Roots", "layer_name", "modules_inside"]

MODEL = "(model)"
"""Name for values that the model's own forward saves, outside of its layers."""

_CALL = torch.nn.Module._wrapped_call_impl.__code__
"""Code that every call of a module runs; its locals are the module and its arguments."""


class Place(NamedTuple):
    """The place in a model where something is made."""

    layer: str
    """The name used in figures; empty outside of all modules."""
    path: str
    """The module's qualified name; with several models, the model's index stands before it."""


NOWHERE: Final = Place("", "")


class Roots:
    """The modules of an Offload, which alone keeps them alive.

    A module may hold a result. That keeps the hooks of its step alive, and all that they know. If
    this included the module, Python's garbage collector would find neither.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._references = tuple(map(weakref.ref, modules))

    def living(self) -> tuple[torch.nn.Module, ...]:
        """Return the modules; none after their Offload has been deleted with them."""
        found = (reference() for reference in self._references)
        return tuple(module for module in found if module is not None)


class Layers:
    """The layers of an Offload's modules."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        """Examine the modules only at the first call of `current`; they may be incomplete now."""
        self._roots = Roots(modules)
        self._places: dict[int, Place] | None = None

    def current(self) -> Place:
        """Return the place of the innermost module whose forward this thread is in."""
        if self._places is None:
            self._places = _places_inside(self._roots.living())
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


def modules_inside(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield some modules and all modules inside them, each once.

    Every step iterates over them before its first kernel. So this does not use `modules()`, which
    takes three times as long.
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
    """Return each module's place by id; with several roots, the root's index is its prefix."""
    places: dict[int, Place] = {}
    for index, root in enumerate(roots):
        prefix = f"{index}:" if len(roots) > 1 else ""
        for name, module in root.named_modules():
            places.setdefault(id(module), Place(prefix + layer_name(name), prefix + name))
    return places


def layer_name(module: str) -> str:
    """Return the layer that contains the module of this qualified name.

    The layer is the name up to its first number, as in "model.layers.3" for
    "model.layers.3.mlp.up", or the first part of a name without numbers.
    """
    if not module:
        return MODEL
    return next(numbered_layers(module), module.partition(".")[0])
