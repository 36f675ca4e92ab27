"""Captures a step: runs its Python code once, records what it does, and leaves no trace.

Changes outside of tensors are undone: gradients of leaves, the optimizers' tables, the modules'
buffers (`tables.py`). These changes become part of the captured step, and each run makes them in
the real objects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from storm_client.eager.function_modes import Watching
from storm_client.step.captured import Captured
from storm_client.step.draws import Draws
from storm_client.step.loops import CAPTURING, Loop
from storm_client.step.recording import Recorder, Recording
from storm_client.step.refusals import data_dependent, not_in_place
from storm_client.step.scalars import number_of
from storm_client.step.tables import Tables, check_arguments, conclude
from storm_client.step.variables import variables_of_type

__all__ = ["capture"]

_ONE_AT_A_TIME = threading.RLock()
"""Held during a capture, which puts its own hooks on all modules and optimizers."""


def capture(
    step: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Captured:
    """Capture a step for arguments like these, without changing anything.

    Raises:
        UsageError: the step cannot be captured; the message names the line.
        Exception: whatever the step raises.
    """
    recording = Recording()
    captured = Captured(recording, Loop(recording))
    leaves, spec = pytree.tree_flatten((arguments, options))
    arguments, options = pytree.tree_unflatten(leaves, spec)  # the step may change these
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for number, tensor in enumerate(tensors):
        recording.input_for(tensor, number)
    with _ONE_AT_A_TIME, ExitStack() as stack:
        tables, draws = Tables(captured), Draws()
        draws.check_step(step, leaves)
        stack.callback(tables.put_back)
        stack.enter_context(recording.generators)
        for value in (*variables_of_type(step, torch.Generator), *leaves):
            if isinstance(value, torch.Generator):
                recording.generators.watch(value)
        stack.enter_context(_watching(captured, tables, draws))
        for module in variables_of_type(step, nn.Module):
            tables.record_module(module)
        for optimizer in variables_of_type(step, Optimizer):
            tables.record_optimizer(optimizer)
        with draws.watching():
            returned = _returned(step, arguments, options)
        draws.check()
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            conclude(captured, tables, returned)
            check_arguments(captured, (arguments, options))
            recording.generators.check()
    recording.graph.erase_node(recording.root)
    recording.drop_weak_references()
    return captured


def _returned(step: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return step(*arguments, **options)
    except TypeError as error:
        if "SymFloat" not in str(error):
            raise
        raise data_dependent("as a number", error) from error
    except RuntimeError as error:
        if "data is not allocated" not in str(error):
            raise
        raise data_dependent("its memory", error) from error


@contextmanager
def _watching(captured: Captured, tables: Tables, draws: Draws) -> Iterator[None]:
    """Record the operations that run in the block, and note modules and optimizers that run."""
    outer, CAPTURING.loop = CAPTURING.loop, captured.loop
    thread = threading.get_ident()

    def on_module(module: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            tables.record_module(module)
            draws.check_module(module)

    def on_buffer(module: nn.Module, name: str, _: object) -> None:
        if threading.get_ident() == thread and name in module._buffers:
            tables.record_module(module)

    def on_parameter(module: nn.Module, name: str, parameter: object) -> None:
        is_new = module._parameters.get(name) is not None and captured.recording.has(parameter)
        if threading.get_ident() == thread and is_new:
            raise not_in_place("makes a parameter anew", f"{type(module).__name__}.{name}")

    def on_optimizer(optimizer: Optimizer, *_: object) -> None:
        if threading.get_ident() == thread:
            tables.record_optimizer(optimizer)

    with ExitStack() as stack:
        stack.callback(setattr, CAPTURING, "loop", outer)
        stack.callback(torch.clear_autocast_cache)
        for hook in (
            register_module_forward_pre_hook(on_module),
            register_module_buffer_registration_hook(on_buffer),
            register_module_parameter_registration_hook(on_parameter),
            register_optimizer_step_pre_hook(on_optimizer),
        ):
            stack.callback(hook.remove)
        torch.clear_autocast_cache()
        stack.enter_context(Recorder(captured.recording))
        stack.enter_context(_Watcher(captured))
        yield


class _Watcher(Watching):
    """Sees what does not reach the recorder: accesses to gradients, numbers for fused updates."""

    is_for_compiled_code = True

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self.captured = captured

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _READ_PAST_OPERATIONS or (func is _FORMAT and args[1:] != ("",)):
            raise data_dependent(f".{func.__name__}()")
        if func == _DATA.__set__:
            raise not_in_place("gives a tensor other memory", ".data = ...")
        if func in _OF_GRADIENTS:
            tensor = args[0]
            if not isinstance(tensor, FakeTensor):
                self.captured.recording.record_leaf(tensor)
        if func in _OF_FLAGS and not isinstance(args[0], FakeTensor):
            self.captured.recording.record_flag(args[0])
        name = getattr(func, "__name__", "")
        if name.startswith("_fused_") and any(number_of(one) for one in options.values()):
            packet = getattr(torch.ops.aten, name)
            is_tensor = isinstance(options.get("lr"), torch.Tensor)
            overload = packet.tensor_lr if is_tensor else packet.default
            with torch.utils._python_dispatch._disable_current_modes():
                return self.captured.recording.run(overload, args, options)
        return func(*args, **options)


_READ_PAST_OPERATIONS = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
)
"""Methods that read the content of a tensor from before the step without a recorded operation."""

_FORMAT = torch.Tensor.__format__

_DATA: Any = torch.Tensor.data
_GRADIENT: Any = torch.Tensor.grad
_FLAG: Any = torch.Tensor.requires_grad
_OF_FLAGS = (_FLAG.__set__, torch.Tensor.requires_grad_)
_OF_GRADIENTS = (_GRADIENT.__set__, _GRADIENT.__get__)
