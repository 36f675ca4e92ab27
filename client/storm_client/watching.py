"""Function modes that watch, and that PyTorch's own modules are not to notice.

Attention and encoder layers that are evaluated, where nothing needs a gradient, run in one kernel
whose bits differ from those of its parts. They do so unless they are given a tensor that overrides
PyTorch's functions, and the function that tells takes any mode for one. So while a mode of ours is
on, it is asked as if that were not. Outside of that nothing of PyTorch is replaced: TorchScript and
Dynamo know the function itself.

A script's own modes may have functions return anything, and be on in one of the two passes alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from storm_client.blocks import function_modes, have_modes, untraced

__all__ = ["Watching", "are_altered", "unaltered"]

_has_torch_function = torch.overrides.has_torch_function
_disabled = torch._C._disabled_torch_function_impl


class Watching(TorchFunctionMode):
    """A mode that passes all functions through, until a block of it ends or `end` is called."""

    def __init__(self) -> None:
        """Be unnoticed from here on."""
        super().__init__()
        with _LOCK:
            _LIVING.add(self)
            torch.overrides.has_torch_function = _has_any_besides

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
