"""What modules, optimizers and gradients have: as it was before a step is captured, and is then.

What the step's code has made of it becomes results of the capture, which each run puts in the place
of what is there; and all is put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from storm_client.errors import UsageError
from storm_client.step.captured import LIFTED, Captured, Result, Setting, is_lifted
from storm_client.step.scalars import number_of
from storm_client.step.variables import NO_STATE, attributes, is_value, of_optimizer

__all__ = ["Tables", "check_arguments", "conclude"]


class Tables:
    """What was where before a step is captured, to be put back."""

    def __init__(self, captured: Captured) -> None:
        """Have seen nothing; what is seen is added to what `captured` knows."""
        self.captured = captured
        self.states: list[dict[Any, dict[Any, Any]]] = []
        self.groups: list[list[dict[str, Any]]] = []
        self.given: list[list[dict[str, Any]]] = []
        """The groups as the step was given them, with numbers for settings."""
        self.attributes: list[dict[str, Any]] = []
        self.looks: list[dict[str, Any]] = []
        """What told the attributes of modules from others."""
        self.contents: list[tuple[Any, Any]] = []
        """Lists and tables that modules have, with copies of them."""
        self.own: list[dict[str, Any]] = []
        """The attributes of optimizers."""
        self.own_looks: list[dict[Any, Any]] = []
        """What told these, and what is in their states, from others."""
        self.buffers: list[dict[str, Any]] = []
        self._seen: set[int] = set()
        """The ids of modules, which are held."""

    def see_module(self, module: nn.Module) -> None:
        """Note a module that is called, or a buffer of which is assigned, before it is.

        Those in it are noted, too: lists of modules are never called.
        """
        if id(module) in self._seen:
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"the step uses a module of TorchScript's ({type(module).__name__}), whose tables "
                "cannot be put back; use the module that it was made of"
            )
        for one in module.modules():
            if id(one) not in self._seen:
                self._seen.add(id(one))
                self.captured.modules.append(one)
                self.attributes.append(dict(one.__dict__))
                self.looks.append(attributes(one))
                own = (value for key, value in one.__dict__.items() if key in self.looks[-1])
                self.contents += [(held, held.copy()) for held in own if type(held) in (list, dict)]
                self.buffers.append(dict(one._buffers))

    def see_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer that makes a step, before it does; its settings become numbers."""
        captured = self.captured
        if any(known is optimizer for known in captured.optimizers):
            return
        captured.optimizers.append(optimizer)
        self.own.append(dict(optimizer.__dict__))
        self.own_looks.append(of_optimizer(optimizer))
        self.contents += [(held, held.copy()) for held in _containers(optimizer)]
        self.states.append(
            {
                key: dict(value) if type(value) is dict else value
                for key, value in optimizer.state.items()
            }
        )
        self.groups.append([dict(group) for group in optimizer.param_groups])
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                captured.recording.see_leaf(parameter)
            for key in LIFTED:
                if key in group:
                    group[key] = self._lifted(optimizer, number, key)
        self.given.append([dict(group) for group in optimizer.param_groups])

    def _lifted(self, optimizer: Optimizer, group: int, key: str) -> Any:
        value = optimizer.param_groups[group][key]
        if not is_lifted(value):
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
        """Have everything as it was before."""
        self._put_optimizers_back()
        self._put_modules_back()
        for tensor, gradient in self.captured.recording.leaves.values():
            tensor.grad = gradient
        for tensor, is_trained in self.captured.recording.flags.values():
            if tensor.requires_grad is not is_trained:
                tensor.requires_grad_(is_trained)

    def _put_optimizers_back(self) -> None:
        for optimizer, state, groups, table in zip(
            self.captured.optimizers, self.states, self.groups, self.own, strict=False
        ):
            kept = {key: optimizer.__dict__[key] for key in NO_STATE if key in optimizer.__dict__}
            optimizer.__dict__.clear()
            optimizer.__dict__.update(table | kept)
            for key in list(optimizer.state):
                if key not in state:
                    del optimizer.state[key]
                elif type(optimizer.state[key]) is dict and type(state[key]) is dict:
                    optimizer.state[key].clear()
                    optimizer.state[key].update(state[key])
                else:
                    optimizer.state[key] = state[key]
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(before)

    def _put_modules_back(self) -> None:
        for held, before in self.contents:
            held.clear()
            held.extend(before) if isinstance(held, list) else held.update(before)
        for module, before, buffers in zip(
            self.captured.modules, self.attributes, self.buffers, strict=True
        ):
            module._buffers.clear()
            module._buffers.update(buffers)
            module.__dict__.clear()
            module.__dict__.update(before)


def conclude(captured: Captured, tables: Tables, returned: Any) -> None:
    """Note what the step returns and leaves behind.

    Raises:
        UsageError: it is something that a run could not return, or leave there.
    """
    leaves, captured.spec = pytree.tree_flatten(
        returned, is_leaf=lambda one: isinstance(one, torch.Size)
    )
    for leaf in leaves:
        if any(captured.recording.has(one) for one in _inside(leaf)):
            raise UsageError(
                f"the step returns tensors in a {type(leaf).__name__}, in which a run could not "
                "put its own; return tuples, lists and dicts, or make the class known to "
                "torch.utils._pytree"
            )
    captured.returned = [_result(captured, leaf, ()) for leaf in leaves]
    for tensor, before in captured.recording.leaves.values():
        if tensor.grad is not before:
            captured.left.append(_result(captured, tensor.grad, ("grad", tensor)))
    if any(
        tensor.requires_grad is not before for tensor, before in captured.recording.flags.values()
    ):
        raise UsageError(
            "the step freezes parameters or has them trained again, and would only when it is "
            "captured; call requires_grad_() after the step: a captured one follows what it sets"
        )
    _conclude_optimizers(captured, tables)
    _conclude_modules(captured, tables)


def _conclude_optimizers(captured: Captured, tables: Tables) -> None:
    for optimizer, states, given, looks in zip(
        captured.optimizers, tables.states, tables.given, tables.own_looks, strict=True
    ):
        _check_groups(optimizer, given)
        for (place, key), look in of_optimizer(optimizer).items():
            is_new = place is not None and (place, key) not in looks
            if not is_new and look != looks.get((place, key)):
                raise _counted(optimizer, key or place, _held(optimizer, place, key))
        for parameter, state in optimizer.state.items():
            known = states.get(parameter, {})
            for key, value in state.items() if type(state) is dict else ():
                if key not in known or value is not known[key]:
                    path = ("state", optimizer, parameter, key)
                    captured.left.append(_kept(captured, value, known.get(key), path))


def _conclude_modules(captured: Captured, tables: Tables) -> None:
    for module, before, looks, buffers in zip(
        captured.modules, tables.attributes, tables.looks, tables.buffers, strict=True
    ):
        for name, value in module._buffers.items():
            if value is not buffers.get(name):
                captured.left.append(_result(captured, value, ("buffer", module, name)))
        for name, value in module.__dict__.items():
            if _holds_a_tensor(captured, value) and name != "_buffers":
                raise UsageError(
                    f"the step puts a tensor into {type(module).__name__}.{name}, which each run "
                    "would have to do again; register it as a buffer, or return it"
                )
        if module.__dict__.get("training") is not before.get("training"):  # wrappers have none
            captured.left.append(Result(None, module.training, ("mode", module, "training")))
        _conclude_attributes(captured, module, before, looks)


def _conclude_attributes(
    captured: Captured, module: nn.Module, before: dict[str, Any], looks: dict[str, Any]
) -> None:
    for name, look in attributes(module).items():
        value = module.__dict__[name]
        if look == looks.get(name):
            continue
        if value is before.get(name):
            raise UsageError(
                f"the step changes what {type(module).__name__}.{name} holds, which each run "
                "would have to do again; leave that to what calls the step"
            )
        if is_value(value):
            captured.left.append(_result(captured, value, ("attribute", module, name)))


def check_arguments(captured: Captured, given: object) -> None:
    """Raise where lists and tables that a step was given hold what it has made.

    Raises:
        UsageError: they do.
    """
    if _holds_a_tensor(captured, given):
        raise UsageError(
            "the step puts a tensor into a list or table that it is given as an argument, which "
            "each run would have to do again; return it"
        )


def _inside(leaf: object) -> list[object]:
    """Return what an object or a set that was returned holds itself."""
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


def _containers(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the lists and tables that an optimizer has as attributes and in its state."""
    tables = (table for table in optimizer.state.values() if type(table) is dict)
    for table in (optimizer.__dict__, *tables):
        for key, value in table.items():
            if type(value) in (list, dict) and key != "param_groups":
                yield value


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
    for group, before in zip(optimizer.param_groups, given, strict=True):
        for key, value in group.items():
            if value is not before.get(key):
                raise UsageError(
                    f"the step changes {key!r} of {type(optimizer).__name__}, as a scheduler does; "
                    "call the scheduler after the step: a captured one follows what it sets"
                )


def _holds_a_tensor(captured: Captured, value: Any) -> bool:
    return any(captured.recording.has(leaf) for leaf in pytree.tree_leaves(value))
