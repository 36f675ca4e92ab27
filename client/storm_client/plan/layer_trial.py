"""Finds out whether a layer's forward may be called a second time, by calling it twice.

Both calls are made in the forward pass, and the first one's result is what goes on. So a layer that
does not do the same twice has cost time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from storm_client.layers import parts_of
from storm_client.plan.recipes import checksum

__all__ = ["call_twice", "own_tensors", "state_of", "tensors_in"]

_NUMBERS = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_CHANGES = "its forward changes what its modules hold"


def call_twice(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    unseen_by: TorchFunctionMode | None = None,
) -> tuple[Any, str]:
    """Return what the first call of a module's `forward` makes, and how the second differs.

    That is empty where it does not. The second call, of which the mode `unseen_by` sees nothing,
    makes a graph of its own, which nobody keeps; what it raises is returned as a difference.
    """
    tensors, parts = tensors_in((*args, *kwargs.values())), list(parts_of([module]))
    held, versions = _held(parts), [tensor._version for tensor in tensors]
    randomness = _RandomStates(tensors)
    first, second = _Checksums(), _Checksums()
    with first:
        made = forward(*args, **kwargs)
    if [tensor._version for tensor in tensors] != versions:
        return made, "it changes what it is given"
    if _held(parts) != held:
        return made, _CHANGES
    apart = iter([tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors])
    args, kwargs = _replaced(args, apart), _replaced(kwargs, apart)
    try:
        with _Unseen(unseen_by), saved_tensors_hooks(_nothing, _nothing), randomness, second:
            forward(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - nobody has asked for this call, so it may not raise
        return made, f"its second call failed: {type(error).__name__}: {error}"
    if _held(parts) != held:
        return made, _CHANGES
    return made, "" if first.equals(second) else "called twice it had other bits"


class _Unseen:
    """A context in which functions do not pass through `mode`, where that is the innermost."""

    def __init__(self, mode: TorchFunctionMode | None) -> None:
        count = torch._C._len_torch_function_stack()
        is_innermost = count > 0 and torch._C._get_function_stack_at(count - 1) is mode
        self._mode = mode if is_innermost else None

    def __enter__(self) -> None:
        if self._mode is not None:
            torch._C._pop_torch_function_stack()

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            torch._C._push_on_torch_function_stack(self._mode)


class _RandomStates:
    """The random number generators as they were: a context in which they are so again."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._devices = sorted({t.device.index for t in tensors if t.is_cuda})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._after: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._after = torch.random.fork_rng(self._devices)
        self._after.__enter__()
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    def __exit__(self, *error: Any) -> None:
        """Have them be as they are."""
        self._after.__exit__(*error)


class _Checksums(TorchFunctionMode):
    """Takes a checksum of each tensor that PyTorch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[torch.Tensor] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function and note what it returned."""
        made = function(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                    self._found.append(checksum(tensor.untyped_storage()))
        return made

    def equals(self, other: _Checksums) -> bool:
        """Tell whether both have seen the same; waits for the device."""
        if len(self._found) != len(other._found):
            return False
        return all(map(torch.equal, self._found, other._found))


def _held(parts: Iterable[torch.nn.Module]) -> list[object]:
    """Return what tells whether modules hold the same: objects, lengths and versions."""
    found: list[object] = []
    for part in parts:
        for name, value in part.__dict__.items():
            if name == "forward":
                continue
            found += [name, id(value)]
            if isinstance(value, (list, dict, set)):
                found.append(len(value))
        found += state_of(part)
    return found


def own_tensors(part: torch.nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters and buffers, without those of its parts."""
    tensors = (*part._parameters.values(), *part._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def state_of(part: torch.nn.Module) -> tuple[object, ...]:
    """Return what tells whether a module's own tensors and mode are the same."""
    tensors = own_tensors(part)
    return (part.training, *((id(tensor), tensor._version) for tensor in tensors))


def tensors_in(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among some arguments.

    Raises:
        TypeError: one could hold what calls change.
    """
    found: list[torch.Tensor] = []
    for argument in arguments:
        if type(argument) in (torch.Tensor, torch.nn.Parameter):
            found.append(argument)
        elif type(argument) in (tuple, list, dict):
            found += tensors_in(argument.values() if type(argument) is dict else argument)
        elif not isinstance(argument, _NUMBERS):
            raise TypeError(
                f"it is given a {type(argument).__name__}, which each call may write to; if that "
                "is a cache, train with model.config.use_cache = False"
            )
    return found


def _replaced(argument: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return arguments with the next of `tensors` in the place of theirs."""
    if type(argument) in (torch.Tensor, torch.nn.Parameter):
        return next(tensors)
    if type(argument) is dict:
        return {name: _replaced(value, tensors) for name, value in argument.items()}
    if type(argument) in (tuple, list):
        return type(argument)(_replaced(value, tensors) for value in argument)
    return argument


def _nothing(_: object) -> Any:
    """Stand in for both hooks of a graph that nobody goes back through.

    One that returned the tensor would have results hold themselves, for ever.
    """
