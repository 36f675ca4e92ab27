"""Recomputes the layers that the user names in the backward pass, with PyTorch's checkpointing.

During a block each named module has a replaced `forward`. It looks at the innermost hooks on
PyTorch's stack of saved-tensor hooks. If they belong to a step that names the module, the call is
checkpointed: the layer's inputs go through the step's hooks, and tensors saved inside the layer do
not. In all other cases the module's own forward runs. These cases are other threads, layers within
layers, calls within other hooks, and the recomputation. Outside of blocks the module is unmodified.

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
    """The layers that the steps of one Offload checkpoint. Several threads may share the object."""

    def __init__(self, modules: Iterable[torch.nn.Module] = ()) -> None:
        """Checkpoint calls of these modules."""
        self.modules = tuple(modules)
        self._forwards: dict[int, _Forward] = {}
        """By the module's id. A forward is reused: compiled code recompiles if it gets a new
        object."""

    def begin(self, step: object) -> None:
        """Checkpoint calls while the innermost hooks are methods of `step`, held weakly."""
        with _LOCK:
            for module in self.modules:
                forward = self._install(module)
                forward.steps = (*forward.other_living_steps(step), weakref.ref(step))

    def end(self, step: object) -> None:
        """Stop checkpointing for `step`; the last step restores the modules' own forwards.

        If somebody else has replaced a module's forward meanwhile, that forward remains.
        """
        with _LOCK:
            for module in self.modules:
                forward = vars(module).get("forward")
                if isinstance(forward, _Forward):
                    forward.steps = forward.other_living_steps(step)
                    if not forward.steps:
                        forward.restore_forward(module)

    def _install(self, module: torch.nn.Module) -> _Forward:
        """Put our forward on a module unless it has one, and return it; call with the lock held.

        The returned forward is never one that the module's present forward may call, because it
        would then call itself.
        """
        present = vars(module).get("forward")
        if isinstance(present, _Forward):
            return present
        known = self._forwards.get(id(module))
        if known is None or not known.wraps_forward_of(module):
            known = self._forwards[id(module)] = _Forward(module)
        vars(module)["forward"] = known
        return known


_LOCK: Final = threading.Lock()
"""Protects which modules have a forward of ours, and the steps that each forward knows."""


class _Forward:
    """Replaces a module's forward. Copying or pickling it yields the wrapped forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._was_own = "forward" in vars(module)
        self.__wrapped__: Callable[..., Any] = module.forward
        """`inspect` reads the signature from this attribute."""
        self.steps: tuple[weakref.ref[Any], ...] = ()

    def wraps_forward_of(self, module: torch.nn.Module) -> bool:
        """Return whether a module's present forward is the one that this object wraps."""
        return self.__wrapped__ == module.forward and self._was_own == ("forward" in vars(module))

    def other_living_steps(self, step: object) -> tuple[weakref.ref[Any], ...]:
        """Return the other living steps; one that an interrupt ended may live for a while."""
        return tuple(one for one in self.steps if one() not in (None, step))

    def restore_forward(self, module: torch.nn.Module) -> None:
        """Restore a module's own forward."""
        if self._was_own:
            vars(module)["forward"] = self.__wrapped__
        else:
            del vars(module)["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward and return its result, checkpointed if a step names the module.

        While torch.compile traces, the plain forward is called, so the compiler decides.
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
        """Return whether this thread's innermost hooks are of a step that names the module."""
        step = innermost() if torch.is_grad_enabled() else None
        return step is not None and any(one() is step for one in self.steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (SimpleNamespace(forward=self.__wrapped__), "forward")


class _Held(NamedTuple):
    """Wraps a tensor that autograd cannot save: an inference tensor."""

    tensor: torch.Tensor


def _checkpointed(forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a forward so that the tensors it saves are recomputed in the backward pass.

    Keyword arguments are passed to PyTorch by position. So their tensors, too, are saved by our
    hooks, and unpacking raises if they are modified in place before the backward pass.
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
    """Close the frames of PyTorch's checkpointing that an exception has left open.

    Some versions leave their hooks on the stack until the traceback is freed. At that time they pop
    their own hooks or, by mistake, another's.
    """
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == pytorch.__file__:
            with suppress(RuntimeError):  # a frame further out is still running
                frame.clear()
