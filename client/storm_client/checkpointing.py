"""Calls the layers that a user names again in the backward pass, by PyTorch's own checkpointing.

While a block is under way each named module has a `forward` that asks who is innermost on PyTorch's
stack of saved-tensor hooks. If that is a step that names it, the call is checkpointed: the layer's
inputs go through the step's hooks, and nothing that is saved inside does. In all else, which are
other threads, layers within layers, within other hooks, and the recomputation, it is the module's
own forward. Outside of blocks nothing of ours is on the module.

The forward is wrapped, not the call: hooks of the module itself, FSDP2's among them, run once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch.utils import checkpoint as pytorch

from storm_client.hook_stack import Stacks, innermost

__all__ = ["CheckpointedLayers"]


class CheckpointedLayers:
    """The layers that one Offload's steps checkpoint. Threads may share it."""

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        """Checkpoint calls of these modules."""
        self.modules = tuple(modules)
        self._forwards: dict[int, _Forward] = {}
        """By the module's id; what was compiled is compiled anew where it meets another object."""

    def begin(self, step: object) -> None:
        """Checkpoint calls while the innermost hooks are methods of `step`, which is not kept."""
        with _LOCK:
            for module in self.modules:
                forward = self._put_on(module)
                forward.steps = (*forward.living_besides(step), weakref.ref(step))

    def end(self, step: object) -> None:
        """Leave calls alone again; the last step has modules be as they were before the first.

        A forward that somebody else has put on the module meanwhile stays there.
        """
        with _LOCK:
            for module in self.modules:
                forward = vars(module).get("forward")
                if isinstance(forward, _Forward):
                    forward.steps = forward.living_besides(step)
                    if not forward.steps:
                        forward.leave(module)

    def _put_on(self, module: torch.nn.Module) -> _Forward:
        """Return the forward that stands for a module's own, on it; with the lock held.

        Never one that what is there now may call: that one would call itself.
        """
        present = vars(module).get("forward")
        if isinstance(present, _Forward):
            return present
        known = self._forwards.get(id(module))
        if known is None or not known.stands_for(module):
            known = self._forwards[id(module)] = _Forward(module)
        vars(module)["forward"] = known
        return known


_LOCK: Final = threading.Lock()
"""Protects which modules have a forward of ours, and of which steps each knows."""


class _Forward:
    """Stands for a module's forward; copied and pickled it is that one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._was_own = "forward" in vars(module)
        self.__wrapped__: Callable[..., Any] = module.forward
        """Where `inspect` looks for a signature."""
        self.steps: tuple[weakref.ref[Any], ...] = ()

    def stands_for(self, module: torch.nn.Module) -> bool:
        """Tell whether a module's forward is that which this one calls."""
        return self.__wrapped__ == module.forward and self._was_own == ("forward" in vars(module))

    def living_besides(self, step: object) -> tuple[weakref.ref[Any], ...]:
        """Return the other steps. One that an interrupt has ended unseen lives for a while."""
        return tuple(one for one in self.steps if one() not in (None, step))

    def leave(self, module: torch.nn.Module) -> None:
        """Give a module its forward back."""
        if self._was_own:
            vars(module)["forward"] = self.__wrapped__
        else:
            del vars(module)["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's forward returns, checkpointed where a step asks for it.

        What is compiled is left to its compiler.
        """
        if torch.compiler.is_compiling() or not self._is_named():
            return self.__wrapped__(*args, **kwargs)
        stacks = Stacks()
        try:
            return _checkpointed(self.__wrapped__, args, kwargs)
        except BaseException as error:
            _end_frames(error)
            stacks.restore()
            raise

    def _is_named(self) -> bool:
        """Tell whether the innermost hooks of this thread are of a step that names the module."""
        step = innermost() if torch.is_grad_enabled() else None
        return step is not None and any(one() is step for one in self.steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (SimpleNamespace(forward=self.__wrapped__), "forward")


class _Held(NamedTuple):
    """A tensor that autograd cannot save."""

    tensor: torch.Tensor


def _checkpointed(forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a forward so that what it saves is recomputed in the backward pass.

    Tensors that are given by name are handed to PyTorch by place: so they are saved too, by our
    hooks, and raise if they are changed in place before the backward pass.
    """
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        given = [one.tensor if isinstance(one, _Held) else one for one in values]
        return forward(*given[:count], **dict(zip(names, given[count:], strict=True)))

    values = [
        _Held(one) if isinstance(one, torch.Tensor) and one.is_inference() else one
        for one in (*args, *kwargs.values())
    ]
    return pytorch.checkpoint(run, *values, use_reentrant=False)


def _end_frames(error: BaseException) -> None:
    """End the calls of PyTorch's checkpointing that an exception has left.

    Some versions leave their hooks on the stack until the traceback dies, and take them off, or
    another's, then.
    """
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == pytorch.__file__:
            with suppress(RuntimeError):  # one that runs still, further out
                frame.clear()
