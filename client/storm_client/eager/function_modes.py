"""Function modes that watch, and that PyTorch's own modules are not to notice.

Attention and encoder layers that are evaluated, where nothing needs a gradient, run in one kernel
whose bits differ from those of its parts. They do so unless they are given a tensor that overrides
PyTorch's functions, and the function that tells takes any mode for one. So while a mode of ours is
on, it is asked as if that were not. Outside of that nothing of PyTorch is replaced: TorchScript and
Dynamo know the function itself.

Compiled code is not to be entered with a mode on: Dynamo would trace the mode, break the graph at
each function, and run those one by one, with other bits than the graph has. So a mode leaves the
stack where its thread enters compiled code, before Dynamo looks at a frame.

A script's own modes may have functions return anything, and be on in one of the two passes alone.

What PyTorch has written in Python, as attention's layers, `interpolate` and `normalize`, passes
through a mode as a whole, and what it calls does not. A mode may look into it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final, TypeGuard

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from storm_client.hook_stack import function_modes, have_modes, untraced

__all__ = ["Watching", "are_altered", "is_in_compiled_code", "looked_into", "unaltered"]

_has_torch_function = torch.overrides.has_torch_function
_disabled = torch._C._disabled_torch_function_impl


_frames = torch._C._dynamo.eval_frame
_set_eval_frame = _frames.set_eval_frame
_DYNAMO: Final = "torch._dynamo.eval_frame"


class Watching(TorchFunctionMode):
    """A mode that passes all functions through, until a block of it ends or `end` is called."""

    meets_compiled_code = False
    """Whether its thread has entered compiled code; the mode is on no stack since."""

    is_for_compiled_code = False
    """Whether it stays on there all the same, as while a step is captured, code and all."""

    def __init__(self) -> None:
        """Be unnoticed from here on."""
        super().__init__()
        with _LOCK:
            _LIVING.add(self)
            torch.overrides.has_torch_function = _has_any_besides
            _watch_dynamo()

    def __exit__(self, *error: Any) -> None:
        """Be taken off the stack."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's gap
        self.end()

    def end(self) -> None:
        """Be on no stack any more."""
        with _LOCK:
            _LIVING.discard(self)
            if not _LIVING:
                torch.overrides.has_torch_function = _has_torch_function
                _leave_dynamo_alone()

    def call_inside(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function that has passed through this mode, so that what it calls does, too."""
        _push_mode(self)
        try:
            return function(*arguments, **options)
        finally:
            _pop_mode()


_push_mode: Final = torch._C._push_on_torch_function_stack
_pop_mode: Final = torch._C._pop_torch_function_stack

_IN_PYTHON: Final = frozenset({torch.nn.functional.__name__, torch.functional.__name__})
"""Modules whose functions call others and do nothing else."""


def looked_into(function: object) -> Callable[..., Any] | None:
    """Return what does as a function of PyTorch's that is written in Python, and passes no mode.

    That asks whether its arguments override it; here none does. None where it does not ask.
    """
    function = _norm if function is torch.Tensor.norm else function
    if type(function) is not FunctionType or function.__module__ not in _IN_PYTHON:
        return None
    asks = [name for name in function.__code__.co_names if name.startswith("has_torch_function")]
    if not asks:
        return None
    names = function.__globals__ | dict.fromkeys(asks, _is_overridden)
    return _with_names(function, names)


def _with_names(function: FunctionType, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the same function, which looks up others in `names`."""
    found = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _is_overridden(*_: Any) -> bool:
    return False


_norm: Final = torch.functional.norm
"""What the method of tensors does."""

_HARMLESS: Final = (Watching, DeviceContext)
"""The latter says where tensors are made that are made from nothing."""


def are_altered() -> bool:
    """Tell whether modes that are not ours may alter what functions return in this thread."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return not all(isinstance(mode, _HARMLESS) for mode in function_modes())


@contextmanager
def unaltered() -> Iterator[None]:
    """Have functions pass through no such modes."""
    modes = function_modes()
    have_modes([mode for mode in modes if isinstance(mode, _HARMLESS)])
    try:
        with _disable_current_modes():
            yield
    finally:
        have_modes(modes)


def is_in_compiled_code() -> bool:
    """Tell whether the caller was called by compiled code, so that Dynamo looks at its frames.

    Dynamo itself says that it does not, to whom it is kept from looking at.
    """
    if _DYNAMO not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _DYNAMO:
            return not frame.f_code.co_qualname.startswith("DisableContext")
        frame = frame.f_back  # type: ignore[assignment]  # None behind the last
    return False


def _watch_dynamo() -> None:
    """Be asked where a thread's frames are to be compiled from then on.

    Dynamo calls `_maybe_set_eval_frame` for that, where no frame is looked at: one of Python's may
    stand for it there, as it may not for `set_eval_frame`, which ends that. Until Dynamo is loaded
    it is taken from the module in C.
    """
    global _entry
    dynamo: Any = sys.modules.get(_DYNAMO)
    if dynamo is None:
        _frames.set_eval_frame = _enters_first
    elif dynamo._maybe_set_eval_frame is not _enters:
        _entry, dynamo._maybe_set_eval_frame = dynamo._maybe_set_eval_frame, _enters


def _leave_dynamo_alone() -> None:
    _frames.set_eval_frame = _set_eval_frame
    dynamo: Any = sys.modules.get(_DYNAMO)
    if dynamo is not None and dynamo._maybe_set_eval_frame is _enters:
        dynamo._maybe_set_eval_frame = _entry


_entry: Callable[[Any], Any] = _set_eval_frame
"""What stands in Dynamo's module while nobody watches."""


def _enters_first(callback: Any) -> Any:
    """Be called once, by a Dynamo that was loaded while a mode watches."""
    dynamo: Any = sys.modules[_DYNAMO]
    _frames.set_eval_frame = dynamo.set_eval_frame = _set_eval_frame
    if dynamo._maybe_set_eval_frame is _enters_first:
        dynamo._maybe_set_eval_frame = _set_eval_frame
    with _LOCK:
        if _LIVING:
            _watch_dynamo()
    return _enters(callback)


def _enters(callback: Any) -> Any:
    """Do as Dynamo does, with no mode that watches on this thread's stack from then on."""
    if callback is not None:
        modes = function_modes()
        watching = [mode for mode in modes if _keeps_out(mode)]
        if watching:
            have_modes([mode for mode in modes if not _keeps_out(mode)])
            for mode in watching:
                mode.meets_compiled_code = True
    return _entry(callback)


def _keeps_out(mode: object) -> TypeGuard[Watching]:
    return isinstance(mode, Watching) and not mode.is_for_compiled_code


_LOCK = threading.Lock()
_LIVING: weakref.WeakSet[Watching] = weakref.WeakSet()
"""What has not ended, in any thread."""


@untraced
def _has_any_besides(args: Iterable[Any]) -> bool:
    """Tell whether anything but modes that watch overrides functions of some arguments."""
    if not _has_torch_function(args):
        return False
    modes = function_modes()
    if not modes or not all(isinstance(mode, Watching) for mode in modes):
        return True
    return any(map(_overrides, args))


def _overrides(argument: object) -> bool:
    kind = type(argument)
    own = getattr(kind, "__torch_function__", _disabled)
    return kind is not torch.Tensor and own is not _disabled
