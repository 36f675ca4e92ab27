"""State of modules, optimizers and gradients, before and after a step is captured.

The changes that the step's code makes become results of the capture, and each run makes them in the
real state. After the capture everything is reset to its state before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from storm_client.errors import UsageError
from storm_client.step.captured import VARYING_SETTINGS, Captured, Result, Setting, is_varying
from storm_client.step.interrupts import uninterrupted
from storm_client.step.places import Places, held_by, put_back
from storm_client.step.recording import is_of_a_capture
from storm_client.step.scalars import number_of
from storm_client.step.variables import (
    NO_STATE,
    attributes,
    is_value,
    of_optimizer,
    of_parameters,
)

__all__ = ["Tables", "check_arguments", "conclude"]


@dataclass(eq=False)
class _SeenModule:
    """A module as it was before the capture."""

    module: nn.Module
    table: dict[str, Any]
    comparable: dict[str, Any]
    """Its attributes, in the form in which they are compared."""
    tables: dict[str, dict[str, Any]]
    """Copies of its tables of parameters, buffers and submodules."""
    parameters: list[tuple[int, dict[str, Any] | None]]
    """The attributes of its parameters, in the form in which they are compared."""

    @classmethod
    def of(cls, module: nn.Module) -> _SeenModule:
        table = dict(module.__dict__)
        copies = {key: dict(table[key]) for key in ("_parameters", "_buffers", "_modules")}
        return cls(module, table, attributes(module), copies, of_parameters(module))

    def put_back(self) -> None:
        put_back(self.module.__dict__, self.table)
        for key, before in self.tables.items():
            put_back(self.table[key], before)


@dataclass(eq=False)
class _SeenOptimizer:
    """An optimizer as it was before the capture."""

    optimizer: Optimizer
    table: dict[str, Any]
    comparable: dict[Any, Any]
    """Its attributes and the values of its state, in the form in which they are compared."""
    states: dict[Any, Any]
    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    """Each group, with a copy of what it held."""
    given: list[dict[str, Any]] = field(default_factory=list)
    """The groups as the step got them, with symbolic numbers for settings."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> _SeenOptimizer:
        states = optimizer.state.items()
        copies = {key: dict(one) if type(one) is dict else one for key, one in states}
        groups = [(group, dict(group)) for group in optimizer.param_groups]
        return cls(optimizer, dict(optimizer.__dict__), of_optimizer(optimizer), copies, groups)

    def put_back(self) -> None:
        optimizer, states = self.optimizer, self.states
        kept = {key: optimizer.__dict__[key] for key in NO_STATE if key in optimizer.__dict__}
        optimizer.__dict__.clear()
        optimizer.__dict__.update(self.table | kept)
        for key, state in list(optimizer.state.items()):
            if key not in states:
                del optimizer.state[key]
            elif type(state) is dict and type(states[key]) is dict:
                state.clear()
                state.update(states[key])
            else:
                optimizer.state[key] = states[key]
        optimizer.param_groups[:] = [group for group, _ in self.groups]
        for group, before in self.groups:
            group.clear()
            group.update(before)


_CHANGED = (dict, list, set, deque)
"""Containers that code can change in place."""


class Tables:
    """The state before a step is captured, to which everything is reset afterwards."""

    def __init__(self, captured: Captured) -> None:
        """Start empty; modules and optimizers that are seen are added to `captured`."""
        self.captured = captured
        self.modules: list[_SeenModule] = []
        self.optimizers: list[_SeenOptimizer] = []
        self.places = Places()
        """What the attributes of modules lead to, and PyTorch's cache of parametrized tensors."""
        self.places.note([("torch.nn.utils.parametrize.cached", parametrize._cache)], depth=0)
        self._contents: list[tuple[Any, dict[Any, Any]]] = []
        """Containers of modules and optimizers, with what they hold."""
        self._seen: set[int] = set()
        """The ids of the modules seen, which are kept alive."""

    def record_module(self, module: nn.Module) -> None:
        """Note a module before it is called or one of its buffers is assigned.

        Its submodules are noted, too: a list of modules is never called.
        """
        if id(module) in self._seen:
            return
        scripted = [one for one in module.modules() if isinstance(one, torch.jit.ScriptModule)]
        if scripted:
            raise UsageError(
                f"the step uses a module of TorchScript's ({type(scripted[0]).__name__}), whose "
                "tables cannot be put back; use the module that it was made of"
            )
        for one in module.modules():
            if id(one) not in self._seen:
                self._seen.add(id(one))
                self.captured.modules.append(one)
                seen = _SeenModule.of(one)
                self.modules.append(seen)
                own = {key: one for key, one in seen.table.items() if key in seen.comparable}
                self._note(own.values())
                members = own | one._parameters
                self.places.note((f"{type(one).__name__}.{key}", members[key]) for key in members)

    def record_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer before it makes a step; its settings become symbolic numbers."""
        captured = self.captured
        if any(
            known.state is getattr(optimizer, "state", known.state) for known in captured.optimizers
        ):
            return  # the same, or one that wraps it
        captured.optimizers.append(optimizer)
        seen = _SeenOptimizer.of(optimizer)
        self.optimizers.append(seen)
        tables = (table for table in optimizer.state.values() if type(table) is dict)
        for table in (optimizer.__dict__, *tables):
            self._note(value for key, value in table.items() if key != "param_groups")
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                captured.recording.record_leaf(parameter)
            for key in VARYING_SETTINGS:
                if key in group:
                    group[key] = self._symbolic(optimizer, number, key)
        seen.given = [dict(group) for group in optimizer.param_groups]

    def _note(self, values: Iterable[Any]) -> None:
        self._contents += [(one, held_by(one) or {}) for one in values if isinstance(one, _CHANGED)]

    def _symbolic(self, optimizer: Optimizer, group: int, key: str) -> Any:
        value = optimizer.param_groups[group][key]
        if not is_varying(value):
            return value
        if isinstance(value, tuple):
            return tuple(
                self._number(one, optimizer, group, key, at) for at, one in enumerate(value)
            )
        return self._number(value, optimizer, group, key, None)

    def _number(
        self, value: float, optimizer: Optimizer, group: int, key: str, place: int | None
    ) -> Any:
        made = self.captured.recording.number(value)
        self.captured.settings.append(Setting(made.node.source, optimizer, group, key, place))
        return made

    def put_back(self) -> None:
        """Reset everything to its state before the capture; Ctrl-C waits for that."""
        with uninterrupted():
            self._put_back()

    def _put_back(self) -> None:
        for optimizer in reversed(self.optimizers):  # the first may share its groups with others
            optimizer.put_back()
        self.places.put_back()
        for held, before in self._contents:
            put_back(held, before)
        for module in self.modules:
            module.put_back()
        for tensor, gradient in self.captured.recording.leaves.values():
            tensor.grad = gradient
        for tensor, is_trained in self.captured.recording.asked.values():
            if tensor.requires_grad is not is_trained:
                tensor.requires_grad_(is_trained)


def conclude(captured: Captured, tables: Tables, returned: Any) -> None:
    """Note the results and the side effects of the step.

    Raises:
        UsageError: a run could not return one of the results, or repeat one of the side effects.
    """
    leaves, captured.spec = pytree.tree_flatten(
        returned, is_leaf=lambda one: isinstance(one, torch.Size)
    )
    for leaf in leaves:
        if any(captured.recording.has(one) for one in _inside(leaf)) or _is_led_to(leaf):
            raise UsageError(
                f"the step returns tensors in a {type(leaf).__name__}, or numbers of the step, and "
                "a run could not put its own there; return tuples, lists and dicts, or make the "
                "class known to torch.utils._pytree"
            )
    captured.returned = [_result(captured, leaf, ()) for leaf in leaves]
    for tensor, before in captured.recording.leaves.values():
        if tensor.grad is not before:
            captured.side_effects.append(_result(captured, tensor.grad, ("grad", tensor)))
    if any(
        tensor.requires_grad is not before for tensor, before in captured.recording.asked.values()
    ):
        raise UsageError(
            "the step freezes or unfreezes parameters, and would do so only while it is captured; "
            "call requires_grad_() after the step: the next call captures it anew"
        )
    for optimizer in tables.optimizers:
        _conclude_optimizer(captured, optimizer)
    for module in tables.modules:
        _conclude_module(captured, module)
    tables.places.check()


def _conclude_optimizer(captured: Captured, seen: _SeenOptimizer) -> None:
    optimizer = seen.optimizer
    _check_groups(optimizer, seen.given)
    for (place, key), now in of_optimizer(optimizer).items():
        is_new = place is not None and (place, key) not in seen.comparable
        if not is_new and now != seen.comparable.get((place, key)):
            raise _counted(optimizer, key or place, _held(optimizer, place, key))
    for parameter, state in optimizer.state.items():
        known = seen.states.get(parameter, {})
        for key, value in state.items() if type(state) is dict else ():
            if key not in known or value is not known[key]:
                path = ("state", optimizer, parameter, key)
                captured.side_effects.append(_kept(captured, value, known.get(key), path))


def _conclude_module(captured: Captured, seen: _SeenModule) -> None:
    module, name_of_class = seen.module, type(seen.module).__name__
    _check_members(seen)
    for name, value in module._buffers.items():
        if value is not seen.tables["_buffers"].get(name):
            captured.side_effects.append(_result(captured, value, ("buffer", module, name)))
    for name, value in module.__dict__.items():
        if _holds_a_tensor(captured, value) and name != "_buffers":
            raise UsageError(
                f"the step puts a tensor into {name_of_class}.{name}, which each run would have to "
                "do again; register it as a buffer, or return it"
            )
    if module.__dict__.get("training") is not seen.table.get("training"):  # wrappers have none
        captured.side_effects.append(Result(None, module.training, ("mode", module, "training")))
    for name, now in attributes(module).items():
        value = module.__dict__[name]
        if now == seen.comparable.get(name):
            continue
        if value is seen.table.get(name):
            raise UsageError(
                f"the step changes what {name_of_class}.{name} holds, which each run would have to "
                "do again; leave that to what calls the step"
            )
        if not is_value(value):
            raise UsageError(
                f"the step sets {name_of_class}.{name} to an object of type "
                f"{type(value).__name__}, which each run would have to make again; set it before "
                "the first step, or keep plain values in it"
            )
        captured.side_effects.append(_result(captured, value, ("attribute", module, name)))


def _check_members(seen: _SeenModule) -> None:
    for key in ("_parameters", "_modules"):
        if list(map(id, seen.table[key].values())) != list(map(id, seen.tables[key].values())):
            raise UsageError(
                f"the step changes which {key[1:]} a {type(seen.module).__name__} has, which each "
                "run would have to do again; do that outside of the step"
            )
    if of_parameters(seen.module) != seen.parameters:
        raise UsageError(
            f"the step changes an attribute of a parameter of {type(seen.module).__name__}, which "
            "each run would have to do again; leave that to what calls the step"
        )


def check_arguments(captured: Captured, given: object) -> None:
    """Raise UsageError if the step has put tensors of its own into lists and dicts passed to it."""
    if _holds_a_tensor(captured, given):
        raise UsageError(
            "the step puts a tensor into a list or table that it is given as an argument, which "
            "each run would have to do again; return it"
        )


def _is_led_to(leaf: object) -> bool:
    """Return whether an object that is returned leads to what only the capture has."""
    is_told = isinstance(leaf, (torch.Tensor, nn.Module)) or is_of_a_capture(leaf)
    return not is_told and Places().is_left(leaf)


def _inside(leaf: object) -> list[object]:
    """Return the values that a returned object or set holds directly."""
    if isinstance(leaf, (torch.Tensor, nn.Module)):
        return []
    if isinstance(leaf, (set, frozenset)):
        return list(leaf)
    found = list((getattr(leaf, "__dict__", None) or {}).values())
    slots = getattr(type(leaf), "__slots__", ())
    found += [getattr(leaf, name, None) for name in ([slots] if type(slots) is str else slots)]
    leaves: list[object] = pytree.tree_leaves(found)
    return leaves


def _kept(captured: Captured, value: Any, before: Any, path: tuple[Any, ...]) -> Result:
    if not isinstance(value, torch.Tensor) and value is not None and value != before:
        raise _counted(path[1], path[3], value)
    return _result(captured, value, path)


def _held(optimizer: Optimizer, place: Any, key: str) -> Any:
    if place is None:
        return optimizer.__dict__[key]
    by_place = {id(one) if isinstance(one, torch.Tensor) else one: one for one in optimizer.state}
    table = optimizer.state[by_place[place]]
    return table[key] if type(table) is dict else table


def _counted(optimizer: Optimizer, key: str, value: object) -> UsageError:
    return UsageError(
        f"{type(optimizer).__name__} counts in Python ({key!r} became {value!r:.200}), which a "
        "captured step cannot; use an optimizer whose state is tensors"
    )


def _result(captured: Captured, value: Any, path: tuple[Any, ...]) -> Result:
    if isinstance(value, torch.Tensor):
        return Result(captured.recording.node_of(value), None, path)
    number = number_of(value)
    if number is None:
        return Result(None, value, path)
    node = number.source if isinstance(number.source, fx.Node) else None
    return Result(node, number.value, path)


def _check_groups(optimizer: Optimizer, given: Sequence[dict[str, Any]]) -> None:
    if len(optimizer.param_groups) != len(given):
        raise UsageError(
            f"the step changes which groups of parameters {type(optimizer).__name__} has, and a "
            "captured one would repeat that; call add_param_group() outside of the step"
        )
    for group, before in zip(optimizer.param_groups, given, strict=True):
        for key, value in group.items():
            if value is not before.get(key):
                raise UsageError(
                    f"the step changes {key!r} of {type(optimizer).__name__}, and a captured one "
                    "would repeat that. Call a scheduler after the step, which follows what it "
                    "sets; an optimizer that changes it itself cannot be captured"
                )


def _holds_a_tensor(captured: Captured, value: Any) -> bool:
    return any(captured.recording.has(leaf) for leaf in pytree.tree_leaves(value))
