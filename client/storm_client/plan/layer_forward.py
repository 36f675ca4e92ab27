"""A layer's place in its module: what is called in its forward's stead while steps are under way.

Whoever calls the layer's module comes by here, whatever else stands around that. What a call does
is said by the thread's step; here is what was noted of the layer when it was tried, and whether it
still is what it was then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Final, Protocol, cast

import torch
from torch.nn.modules import module as modules

from storm_client.blocks import untraced
from storm_client.layers import parts_of
from storm_client.plan.layer_cut import Graphs, LayerCalls
from storm_client.plan.layer_snapshots import Attributes, TensorStates, own_tensors, version_of

__all__ = ["LayerForward", "are_plain", "nbytes_of"]


class _Step(Protocol):
    """What is done with the calls of layers in one step."""

    def call(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer's forward returns."""
        ...


class _Steps(Protocol):
    """All steps of an Offload."""

    def current(self) -> _Step | None:
        """Return this thread's, if it is told of calls."""
        ...


class LayerForward:
    """A layer's place in its module: stands there as its `forward` while steps are under way.

    It does not keep the module, which may be replaced by another. Copies and pickles of the module
    have its forward instead.
    """

    def __init__(self, name: str, module: torch.nn.Module, nbytes: int, graphs: Graphs) -> None:
        """Be that of `module`, a layer of this name that saves so many bytes; see LayerCalls."""
        self.name = name
        self.nbytes = nbytes
        self.input_bytes = 0
        """Of the tensors that it was given when it was tried."""
        self.is_tried = False
        self.refusal = ""
        self._module = weakref.ref(module)
        self._forward = _weakly(module.forward)
        self._before: Callable[..., Any] | None = None
        """What stood there as the module's own forward, while this does."""
        self._is_hooked = False
        self._steps: _Steps | None = None
        self.calls = LayerCalls(graphs)
        self._passed: Attributes | None = None
        """The modules that were tried, and what they had."""
        self._own: TensorStates | None = None
        """Their parameters and buffers then, until the trial is judged."""
        self._given: list[tuple[torch.Tensor, int]] = []
        """What they were given then and its versions, until the block ends."""

    @property
    def module(self) -> torch.nn.Module:
        """The layer, which lives while it is called."""
        module = self._module()
        assert module is not None
        return module

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's forward for which it stands."""
        return self._forward()

    def hook(self, steps: _Steps) -> None:
        """Stand in for the module's forward, unless it still does below what others put there."""
        module = self._module()
        self._steps = steps
        if module is None or self._is_hooked:
            return
        self._before = module.__dict__.get("forward")
        self._forward = _weakly(module.forward)
        module.__dict__["forward"] = self
        self._is_hooked = True

    def unhook(self) -> None:
        """Give its forward back, unless somebody else has put another there, which may call it."""
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        self._is_hooked = False
        if self._before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"], self._before = self._before, None

    def passes(self, parts: Sequence[torch.nn.Module], given: Iterable[torch.Tensor]) -> None:
        """Note what was called twice, and what it was given."""
        self.is_tried, self.input_bytes = True, nbytes_of(given)
        self._given = [(tensor, version_of(tensor)) for tensor in given]
        self._passed = Attributes(parts)
        self._own = TensorStates(own_tensors(parts))

    def passed(self, module: torch.nn.Module) -> tuple[Attributes, list[torch.Tensor]] | None:
        """Return what it was tried with, and the parameters and buffers that it has now.

        None if it has other modules now, or in other modes. It is refused where their attributes
        are set anew: who does that for each call may do so before the backward pass has called it
        again.
        """
        passed = self._passed
        if passed is None or modules._global_forward_hooks or modules._global_forward_pre_hooks:
            return None
        if passed.is_untouched(module):
            return passed, passed.own
        parts = list(parts_of([module]))
        own = own_tensors(parts)
        if not (are_plain(parts, own) and passed.is_of(parts)):
            return None
        if passed.difference(parts):
            self.refuse(_SET_ANEW)
        return None if self.refusal else (passed, own)

    def look_back(self) -> None:
        """Refuse where others set anew what it was called with: its calls may depend on that."""
        if self._passed is None or self._own is None:
            return
        parts = list(parts_of([self.module]))
        if self._passed.is_of(parts) and (
            self._passed.difference(parts) or not self._own.is_of(own_tensors(parts))
        ):
            self.refuse(_SET_ANEW)

    def lets_go(self) -> None:
        """Refuse if what it was given in its trial has been written to before the block's end."""
        given, self._given = self._given, []
        if any(version_of(tensor) != version for tensor, version in given):
            self.refuse("what it is given is changed in place behind its call")

    def judged(self) -> str:
        """Return what speaks against it after the step of its trial."""
        self.look_back()
        self._own = None
        return self.refusal

    @property
    def identity(self) -> int:
        """The module's id; 0 where that is gone."""
        module = self._module()
        return 0 if module is None else id(module)

    def refuse(self, reason: str) -> None:
        """Note why it cannot be run again."""
        self.is_tried = True
        self.refusal = self.refusal or f"{self.name} is not run again: {reason}"

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what this thread's step does with a call."""
        step = None if self._steps is None else self._steps.current()
        return self.forward(*args, **kwargs) if step is None else step.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the forward has: its name, signature or function."""
        return getattr(self.forward, name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Where `inspect` looks for a signature."""
        return self.forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Be copied and pickled as the forward."""
        return _as_it_is, (self.forward,)


_SET_ANEW: Final = "a parameter, a buffer or an attribute of it is set anew between its calls"


def _weakly(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return what returns a function, without keeping the object that it is a method of."""
    if isinstance(function, MethodType):
        return cast("Callable[[], Callable[..., Any]]", weakref.WeakMethod(function))
    return lambda: function


def _as_it_is(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a layer's place is pickled as."""
    return forward


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors together."""
    return sum(tensor.nbytes for tensor in tensors)


def are_plain(parts: Iterable[torch.nn.Module], tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether nobody is told of the calls of modules, whose tensors are ordinary ones."""
    hooks = modules._global_forward_hooks or modules._global_forward_pre_hooks
    if hooks or any(part._forward_hooks or part._forward_pre_hooks for part in parts):
        return False
    return {type(tensor) for tensor in tensors} <= _PLAIN


_PLAIN: Final = {torch.Tensor, torch.nn.Parameter}
