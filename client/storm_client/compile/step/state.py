"""What a captured step reads besides its arguments: where it lies, and what must be as it was.

Tensors are found by where they are, a module's parameter, an optimizer's table, so that a state
that is loaded between steps is used. Anything else that Python code decided by is compared before
each run, and where it differs the step is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.optim.optimizer import Optimizer

from storm_client.compile.step.capture import LIFTED, Captured
from storm_client.compile.step.recording import Outside
from storm_client.compile.step.scalars import evaluate

__all__ = ["State", "described", "surroundings", "variables"]

PLAIN = (bool, int, float, str, bytes, type(None))


class _Slot(NamedTuple):
    """Where a tensor is found: in a table under a key, or as itself where there is none."""

    table: Any
    key: Any

    def find(self) -> Any:
        return self.key if self.table is None else self.table.get(self.key)


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
            _Held.of(one, slots.get(id(one.tensor), _Slot(None, one.tensor)))
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
            (module.training, [id(one) for one in module._modules.values()], _plain(module))
            for module in self.captured.modules
        ]
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

    Only its own, not those of functions that it calls.
    """
    function = getattr(step, "__func__", step)
    code = getattr(function, "__code__", None)
    found: dict[str, Any] = {}
    if code is None:
        return found
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = _identified(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (*PLAIN, nn.Module, Optimizer, torch.Tensor)):
            found[name] = _identified(value)
    return found


def _identified(value: object) -> Any:
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


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
    if key in LIFTED:
        return key, type(value)
    return key, value


def _kind(value: object) -> Any:
    return None if isinstance(value, torch.Tensor) else value


def _slots(captured: Captured) -> dict[int, _Slot]:
    """Return where tensors are found, by their ids."""
    tables: list[Any] = []
    for optimizer in captured.optimizers:
        tables += [*optimizer.param_groups, *optimizer.state.values()]
    for module in captured.modules:
        tables += [module._parameters, module._buffers]
    return {
        id(value): _Slot(table, key)
        for table in tables
        for key, value in table.items()
        if isinstance(value, torch.Tensor)
    }
