"""What a captured step reads besides its arguments: where it lies, and what must be as it was.

Tensors are found by where they are, a module's parameter, an optimizer's table, so that a state
that is loaded between steps is used. Anything else that Python code decided by is compared before
each run, and where it differs the step is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.optim.optimizer import Optimizer

from storm_client.compile.step.capture import LIFTED, Captured, is_lifted
from storm_client.compile.step.recording import Outside
from storm_client.compile.step.scalars import evaluate

__all__ = ["State", "described", "surroundings", "variables"]

PLAIN = (bool, int, float, str, bytes, type(None))

CONTENTS = 64
"""Of a list or table with more than so many things in it, it is not compared what they are."""


class _Itself(NamedTuple):
    """Where a tensor is found that is in no table."""

    tensor: torch.Tensor

    def find(self) -> Any:
        return self.tensor


class _InModule(NamedTuple):
    """Where a module's parameter or buffer is found."""

    table: Mapping[str, Any]
    key: str

    def find(self) -> Any:
        return self.table.get(self.key)


class _InState(NamedTuple):
    """Where an optimizer's state is found; its tables are others when a state was loaded."""

    optimizer: Optimizer
    parameter: Any
    key: str

    def find(self) -> Any:
        return self.optimizer.state.get(self.parameter, {}).get(self.key)


class _InGroup(NamedTuple):
    """Where a setting of an optimizer's group is found, if it is a tensor."""

    optimizer: Optimizer
    number: int
    key: str

    def find(self) -> Any:
        groups = self.optimizer.param_groups
        return groups[self.number].get(self.key) if self.number < len(groups) else None


_Slot = _Itself | _InModule | _InState | _InGroup


class _Held(NamedTuple):
    node: fx.Node
    slot: _Slot
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, outside: Outside, slot: _Slot) -> _Held:
        one = outside.tensor
        return cls(
            outside.node, slot, one.shape, one.dtype, one.device, one.stride(), one.requires_grad
        )

    def fits(self, tensor: object) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and tensor.requires_grad is self.requires_grad
            and tensor.stride() == self.stride
            and tensor.device == self.device
        )


class State:
    """What one captured step reads besides its arguments."""

    def __init__(self, captured: Captured, step: Callable[..., Any]) -> None:
        """Note everything as it is: nothing must have changed since the capture."""
        self.captured = captured
        slots = _slots(captured)
        self.held = [
            _Held.of(one, slots.get(id(one.tensor), _Itself(one.tensor)))
            for one in captured.recording.outside.values()
            if one.argument is None
        ]
        self.arguments = [
            (one.node, one.argument)
            for one in captured.recording.outside.values()
            if one.argument is not None
        ]
        self.step = step
        self.conditions = list(dict.fromkeys(captured.recording.numbers.conditions))
        self.python = self._python()
        self.gradients = [
            (tensor, gradient is None) for tensor, gradient in captured.recording.leaves.values()
        ]

    def _python(self) -> list[Any]:
        """Return what Python code may have decided by."""
        found: list[Any] = [surroundings(), variables(self.step)]
        found += [
            (module.training, _ids(module._modules), _ids(module._parameters), _plain(module))
            for module in self.captured.modules
        ]
        found += [_hooks(module, _HOOKS_OF_MODULES) for module in self.captured.modules]
        leaves = self.captured.recording.leaves.values()
        found += [_hooks(leaf, _HOOKS_OF_LEAVES) for leaf, _ in leaves]
        for optimizer in self.captured.optimizers:
            for group in optimizer.param_groups:
                found.append([_plain_setting(key, value) for key, value in group.items()])
                for parameter in group["params"]:
                    table = optimizer.state.get(parameter, {})
                    found.append([(key, _kind(value)) for key, value in table.items()])
        return found

    def values(self, tensors: list[torch.Tensor]) -> dict[fx.Node, Any] | None:
        """Return the values of the graph's inputs now; None where another capture is needed."""
        found: dict[fx.Node, Any] = {}
        for held in self.held:
            tensor = held.slot.find()
            if not held.fits(tensor):
                return None
            found[held.node] = tensor
        if self.python != self._python():
            return None
        for setting in self.captured.settings:
            found[setting.node] = setting.value()
        if any(evaluate(one.node, found) != one.outcome for one in self.conditions):
            return None
        for node, number in self.arguments:
            found[node] = tensors[number]
        outside = self.captured.recording.outside
        for tensor, had_none in self.gradients:
            known = outside.get(id(tensor))
            now = tensor if known is None else found[known.node]
            if (now.grad is None) is not had_none:
                return None
        return found


def described(leaf: object) -> Any:
    """Return what of an argument a captured step depends on."""
    if isinstance(leaf, torch.Tensor):
        return (
            type(leaf),
            leaf.shape,
            leaf.stride(),
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            leaf.storage_offset() * leaf.element_size() % 16 if leaf.device.type == "meta" else 0,
        )
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    return type(leaf), id(leaf)


def surroundings() -> tuple[Any, ...]:
    """Return the settings of PyTorch's that what is recorded depends on."""
    casts = tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )
    return (
        casts,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def variables(step: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of a function's surroundings, plain ones by value, objects by identity.

    Of lists, tables and objects, such as the one whose method it is, what it reads there too, but
    not what lies deeper. Only its own variables, not those of functions that it calls.
    """
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            _look_at(name, cell.cell_contents, code.co_names, found)
        except ValueError:  # an empty cell
            continue
    for name in code.co_names:
        if name in function.__globals__:
            _look_at(name, function.__globals__[name], code.co_names, found)
    if function is not step:
        _look_at("self", step.__self__, code.co_names, found)  # type: ignore[attr-defined]
    for number, value in enumerate(function.__defaults__ or ()):
        found[f"default {number}"] = _identified(value)
    return found


_OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""What is in a function's surroundings, and is no variable."""


def _look_at(name: str, value: object, names: Sequence[str], found: dict[str, Any]) -> None:
    """Note a variable, and those of its attributes that are among `names`."""
    if isinstance(value, _OPAQUE):
        return
    found[name] = _identified(value)
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, (nn.Module, Optimizer, torch.Tensor)) or type(attributes) is not dict:
        return
    for key in names:
        if key in attributes:
            found[f"{name}.{key}"] = _identified(attributes[key])


def _ids(table: Mapping[str, object]) -> list[int]:
    return list(map(id, table.values()))


def _identified(value: object) -> Any:
    """Return what tells a variable from another, or from itself when it holds other things."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, dict) and len(value) <= CONTENTS:
        return id(value), [(_alone(key), _alone(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)) and len(value) <= CONTENTS:
        return id(value), list(map(_alone, value))
    return id(value), len(value) if isinstance(value, (dict, list)) else None


def _alone(value: object) -> Any:
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


_HOOKS_OF_MODULES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_HOOKS_OF_LEAVES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _hooks(owner: object, tables: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the numbers of a module's or tensor's hooks, which Python code may add and remove."""
    return [tuple(getattr(owner, name, None) or ()) for name in tables]


def _plain(module: nn.Module) -> list[Any]:
    """Return the plain attributes of a module, as a dropout's probability is one."""
    return [
        (key, value)
        for key, value in module.__dict__.items()
        if type(value) in (bool, int, float, str) and key != "training"
    ]


def _plain_setting(key: str, value: Any) -> Any:
    if key == "params":
        return [id(one) for one in value]
    if isinstance(value, torch.Tensor):
        return key, id(value)
    if key in LIFTED and is_lifted(value):
        return key, type(value)
    return key, value


def _kind(value: object) -> Any:
    return None if isinstance(value, torch.Tensor) else value


def _slots(captured: Captured) -> dict[int, _Slot]:
    """Return where tensors are found, by their ids."""
    found: dict[int, _Slot] = {}
    for optimizer in captured.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            found |= {id(one): _InGroup(optimizer, number, key) for key, one in _tensors(group)}
        for parameter, table in optimizer.state.items():
            found |= {id(one): _InState(optimizer, parameter, key) for key, one in _tensors(table)}
    for module in captured.modules:
        for names in (module._parameters, module._buffers):
            found |= {id(one): _InModule(names, key) for key, one in _tensors(names)}
    return found


def _tensors(table: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((key, one) for key, one in table.items() if isinstance(one, torch.Tensor))
