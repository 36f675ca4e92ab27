"""Function modes that watch a step without PyTorch's own modules noticing them.

In evaluation, where nothing needs a gradient, attention and encoder layers run one fused kernel.
Its bits differ from those of the separate operations. The layers do not use it if
`has_torch_function` reports a tensor that overrides PyTorch's functions, and it reports any active
mode as one. So while a mode of ours is on, `has_torch_function` is replaced by a function that
ignores our modes. At other times nothing of PyTorch is replaced, since Dynamo knows the function
object itself. So does TorchScript, for which ours is registered as the same builtin.

No mode may be on when a thread enters compiled code: Dynamo would trace the mode, break the graph
at each function, and run the functions one by one, with other bits than the graph has. So a mode
is taken off the stack where its thread enters compiled code, before Dynamo looks at a frame.

A script's own modes may make functions return anything, and may be on in only one of the two
passes.

A function that PyTorch has written in Python, such as attention's layers, `interpolate` and
`normalize`, passes through a mode as a whole; the functions that it calls do not. A mode may look
into such a function.
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
from torch.jit._builtins import _register_builtin
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from storm_client.hook_stack import function_modes, set_modes, untraced

__all__ = ["Watching", "are_altered", "is_in_compiled_code", "looked_into", "unaltered"]

_has_torch_function = torch.overrides.has_torch_function
_disabled = torch._C._disabled_torch_function_impl


_frames = torch._C._dynamo.eval_frame
_set_eval_frame = _frames.set_eval_frame
_DYNAMO: Final = "torch._dynamo.eval_frame"


class Watching(TorchFunctionMode):
    """A mode that passes all functions through, until a block of it ends or `end` is called."""

    meets_compiled_code = False
    """Whether its thread has entered compiled code; the mode is on no stack since then."""

    is_for_compiled_code = False
    """Whether the mode stays on in compiled code too, as while a whole step is captured."""

    def __init__(self) -> None:
        """Hide the mode from PyTorch's modules from here on."""
        super().__init__()
        with _LOCK:
            _LIVING[:] = [*_living_but(self), weakref.ref(self)]
            torch.overrides.has_torch_function = _has_any_besides
            _watch_dynamo()

    def __exit__(self, *error: Any) -> None:
        """Take the mode off the stack and end it."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's gap
        self.end()

    def end(self) -> None:
        """Stop hiding the mode; with the last one, restore PyTorch's own functions."""
        with _LOCK:
            _LIVING[:] = _living_but(self)
            if not _LIVING:
                torch.overrides.has_torch_function = _has_torch_function
                _leave_dynamo_alone()

    def call_inside(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function with this mode on, so that the functions it calls pass through, too."""
        _push_mode(self)
        try:
            return function(*arguments, **options)
        finally:
            _pop_mode()


_push_mode: Final = torch._C._push_on_torch_function_stack
_pop_mode: Final = torch._C._pop_torch_function_stack

_IN_PYTHON: Final = frozenset({torch.nn.functional.__name__, torch.functional.__name__})
"""Modules whose functions only call other functions."""


def looked_into(function: object) -> Callable[..., Any] | None:
    """Return a copy of a PyTorch function written in Python, for a mode to look into.

    The function asks whether its arguments override it; in the copy the answer is always no.
    Returns None for other functions, and for one that does not ask.
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
    """Return a copy of a function that looks up other functions in `names`."""
    found = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _is_overridden(*_: Any) -> bool:
    return False


_norm: Final = torch.functional.norm
"""The function behind `torch.Tensor.norm`."""

_HARMLESS: Final = (Watching, DeviceContext)
"""DeviceContext only chooses the device on which factory functions make tensors."""


def are_altered() -> bool:
    """Return whether modes that are not ours may alter what functions return in this thread."""
    if torch._C._len_torch_dispatch_stack():
        return True
    return not all(isinstance(mode, _HARMLESS) for mode in function_modes())


@contextmanager
def unaltered() -> Iterator[None]:
    """Take off modes that may alter what functions return, for the length of a block."""
    modes = function_modes()
    set_modes([mode for mode in modes if isinstance(mode, _HARMLESS)])
    try:
        with _disable_current_modes():
            yield
    finally:
        set_modes(modes)


def is_in_compiled_code() -> bool:
    """Return whether compiled code has called the caller, so that Dynamo looks at its frames.

    Dynamo's own query returns False in functions that Dynamo is kept from tracing, as here.
    """
    if _DYNAMO not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _DYNAMO:
            return not frame.f_code.co_qualname.startswith("DisableContext")
        frame = frame.f_back  # type: ignore[assignment]  # None after the last
    return False


def _watch_dynamo() -> None:
    """Have Dynamo call `_enters` before it starts to compile a thread's frames.

    Dynamo calls `_maybe_set_eval_frame` for that. It looks at no frame then, so a Python function
    may replace that function. None may replace `set_eval_frame`, which also stops Dynamo from
    looking at frames. Until Dynamo is loaded, the function is replaced in the C module, from which
    Dynamo will take it.
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
"""The function in Dynamo's module while no mode watches."""


def _enters_first(callback: Any) -> Any:
    """Replace `_enters` properly on the first call by a Dynamo loaded while a mode watches."""
    dynamo: Any = sys.modules[_DYNAMO]
    _frames.set_eval_frame = dynamo.set_eval_frame = _set_eval_frame
    if dynamo._maybe_set_eval_frame is _enters_first:
        dynamo._maybe_set_eval_frame = _set_eval_frame
    with _LOCK:
        if _LIVING:
            _watch_dynamo()
    return _enters(callback)


def _enters(callback: Any) -> Any:
    """Take all watching modes off this thread's stack, then do as Dynamo's function does."""
    if callback is not None:
        modes = function_modes()
        watching = [mode for mode in modes if _keeps_out(mode)]
        if watching:
            set_modes([mode for mode in modes if not _keeps_out(mode)])
            for mode in watching:
                mode.meets_compiled_code = True
    return _entry(callback)


def _keeps_out(mode: object) -> TypeGuard[Watching]:
    return isinstance(mode, Watching) and not mode.is_for_compiled_code


_LOCK = threading.Lock()
_LIVING: Final[list[weakref.ref[Watching]]] = []
"""The modes that have not ended, in any thread. A WeakSet would lose an interrupt in a callback."""


def _living_but(mode: Watching) -> list[weakref.ref[Watching]]:
    return [one for one in _LIVING if one() is not None and one() is not mode]


@untraced
def _has_any_besides(args: Iterable[Any]) -> bool:
    """Return whether anything but watching modes overrides functions for these arguments."""
    if not _has_torch_function(args):
        return False
    modes = function_modes()
    if not modes or not all(isinstance(mode, Watching) for mode in modes):
        return True
    return any(map(_overrides, args))


# A block may be where a script compiles its attention layers: TorchScript would compile ours, too.
_register_builtin(_has_any_besides, "aten::has_torch_function")


def _overrides(argument: object) -> bool:
    kind = type(argument)
    own = getattr(kind, "__torch_function__", _disabled)
    return kind is not torch.Tensor and own is not _disabled
