"""Captures a step: runs its Python code once, records what it does, and leaves no trace.

Changes outside of tensors are undone: gradients of leaves, the optimizers' tables, the modules'
buffers (`tables.py`). These changes become part of the captured step, and each run makes them in
the real objects.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree

from storm_client.eager.function_modes import Watching
from storm_client.step.captured import Captured
from storm_client.step.draws import Draws
from storm_client.step.interrupts import Interrupts
from storm_client.step.kernels import lists_of_fake_tensors
from storm_client.step.loops import CAPTURING, Loop
from storm_client.step.reads import watching_reads
from storm_client.step.recording import Recorder, Recording
from storm_client.step.refusals import data_dependent, not_in_place
from storm_client.step.scalars import as_float, number_of
from storm_client.step.sums import summing
from storm_client.step.tables import Tables, check_arguments, conclude
from storm_client.step.turns import capturing, holding
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
    with holding(_ONE_AT_A_TIME), capturing(), ExitStack() as stack:
        tables, draws = Tables(captured), Draws()
        draws.check_step(step, leaves)
        stack.callback(tables.put_back)
        stack.callback(captured.called.put_back)
        stack.enter_context(recording.generators)
        for value in (*variables_of_type(step, torch.Generator), *leaves):
            if isinstance(value, torch.Generator):
                recording.generators.watch(value)
        stack.enter_context(_watching(captured, tables, draws))
        for module in variables_of_type(step, nn.Module):
            tables.record_module(module)
        for optimizer in variables_of_type(step, Optimizer):
            tables.record_optimizer(optimizer)
        called = captured.called
        with draws.watching(called.note, called.note_result, called.note_asked):
            returned = _returned(step, arguments, options)
        draws.check()
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            conclude(captured, tables, returned)
            captured.called.check()
            check_arguments(captured, (arguments, options))
            recording.generators.check()
    recording.graph.erase_node(recording.root)
    recording.drop_weak_references()
    return captured


def _returned(step: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return step(*arguments, **options)
    except TypeError as error:
        if not any(name in str(error) for name in _OF_NUMBERS):
            raise
        raise data_dependent("as a number", error) from error
    except RuntimeError as error:
        if "data is not allocated" not in str(error):
            raise
        raise data_dependent("its memory", error) from error


_OF_NUMBERS = ("SymFloat", "Object of type float is not JSON serializable")
"""In messages of errors about a number of the capture; a real float has a text in JSON."""


@contextmanager
def _watching(captured: Captured, tables: Tables, draws: Draws) -> Iterator[None]:
    """Record the operations that run in the block, and note modules and optimizers that it reads.

    Those that the step makes are its own: they end with it.
    """
    outer, CAPTURING.loop = CAPTURING.loop, captured.loop
    thread = threading.get_ident()

    def on_module(module: nn.Module, name: str) -> None:
        tables.record_module(module)
        draws.check_module(module, name)

    def on_parameter(module: nn.Module, name: str, parameter: object) -> None:
        is_new = module._parameters.get(name) is not None and captured.recording.has(parameter)
        if threading.get_ident() == thread and is_new:
            raise not_in_place("makes a parameter anew", f"{type(module).__name__}.{name}")

    def on_optimizer(optimizer: Optimizer, _: str) -> None:
        tables.record_optimizer(optimizer)

    with ExitStack() as stack:
        stack.callback(setattr, CAPTURING, "loop", outer)
        stack.callback(torch.clear_autocast_cache)
        stack.callback(register_module_parameter_registration_hook(on_parameter).remove)
        torch.clear_autocast_cache()
        # Backward passes written in Python and hooks are to run in this thread, which is watched.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        interrupts = Interrupts()
        stack.enter_context(interrupts.delayed())
        stack.enter_context(Recorder(captured.recording))
        stack.enter_context(_Watcher(captured, interrupts))
        stack.enter_context(summing())
        stack.enter_context(lists_of_fake_tensors())
        if gc.isenabled():  # what it calls is not the step's
            gc.disable()
            stack.callback(gc.enable)
        stack.enter_context(watching_reads({nn.Module: on_module, Optimizer: on_optimizer}))
        yield


class _Watcher(Watching):
    """Sees what does not reach the recorder: accesses to gradients, numbers for fused updates."""

    is_for_compiled_code = True

    def __init__(self, captured: Captured, interrupts: Interrupts) -> None:
        super().__init__()
        self.captured, self.interrupts = captured, interrupts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _READ_PAST_OPERATIONS:
            raise data_dependent(f".{func.__name__}()")
        if func == _DATA.__set__:
            raise not_in_place("gives a tensor other memory", ".data = ...")
        if func in _OF_GRADIENTS:
            tensor = args[0]
            if not isinstance(tensor, FakeTensor):
                self.captured.recording.record_leaf(tensor)
        if func is torch.Tensor.__deepcopy__ and args[0].is_leaf:
            return self.call_inside(_deeply_copied, *args)
        is_asked = bool(args) and isinstance(args[0], torch.Tensor) and not _is_made(args[0])
        if is_asked:
            self.captured.recording.record_asked(args[0])
        name = getattr(func, "__name__", "")
        if name.startswith("_fused_") and any(number_of(one) for one in options.values()):
            packet = getattr(torch.ops.aten, name)
            is_tensor = isinstance(options.get("lr"), torch.Tensor)
            overload = packet.tensor_lr if is_tensor else packet.default
            with torch.utils._python_dispatch._disable_current_modes():
                return self.captured.recording.run(overload, args, options)
        if func in _RUNNING_HOOKS:
            return self.call_inside(_RUNNING_HOOKS[func], *args, **options)
        found = self.interrupts.run(func, *args, **options)
        if is_asked and not options:
            self.captured.recording.record_answer(func, args, found)
        return as_float(found)


_READ_PAST_OPERATIONS = (
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__format__,
    torch.Tensor.__repr__,
)
"""Methods that read the content of a tensor without a recorded operation."""


def _is_made(tensor: torch.Tensor) -> bool:
    """Return whether the step has made a tensor; those of torch.func's transforms it has."""
    return isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor)


def _deeply_copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a tensor by an operation that is recorded, where `copy.deepcopy` copies its memory."""
    if id(tensor) not in memo:
        made = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            made.grad = deepcopy(tensor.grad, memo)
    found: torch.Tensor = memo[id(tensor)]
    return found


def _not_asking(function: Any) -> Any:
    """Return a copy of a function that does not ask whether modes override it."""
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    made = FunctionType(
        function.__code__, function.__globals__ | never, argdefs=function.__defaults__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_RUNNING_HOOKS = {
    one: _not_asking(one)
    for one in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
}
"""Functions that run hooks and backward passes written in Python, for which the mode stays on."""

_DATA: Any = torch.Tensor.data
_GRADIENT: Any = torch.Tensor.grad
_OF_GRADIENTS = (_GRADIENT.__set__, _GRADIENT.__get__)
