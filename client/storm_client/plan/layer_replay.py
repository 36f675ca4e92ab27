"""Runs whole layers again in the backward pass, where a step waits for the thread that trains.

Hooks and recipes take that thread some time for each tensor. A step of small operations, whose
device waits for the thread, gets longer by that than by PyTorch's checkpointing, which hands over
nothing that is saved inside of a layer and calls its forward a second time. So there the first
layers are checkpointed, by PyTorch's own function, as many as the budget asks for. Those behind
them stay; the backward pass has freed them by the time that the first are run again.

A forward is somebody else's Python code, and to call it twice is right only if it does the same
twice. So it is done to layers alone that are made for it (transformers' GradientCheckpointingLayer)
or that the user has named, and each has to show it: in one step it is called twice in the forward
pass, what its functions return is compared, and so is what its modules hold before and after. And
where anything that it reads was changed before the backward pass, that raises, as it does in
PyTorch for what is saved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from storm_client.compiled import may_be_compiled
from storm_client.errors import ActivationLost
from storm_client.layers import Layers, parts_of
from storm_client.plan.decisions import ReplayedLayer
from storm_client.plan.kinds import HostBound, Kind
from storm_client.plan.layer_trial import call_twice, own_tensors, state_of, tensors_in

if TYPE_CHECKING:
    from storm_client.stats import StatsRecorder

__all__ = ["LayerPhase", "LayerReplay", "LayerStep"]

DECLARED: Final = "GradientCheckpointingLayer"
"""What transformers has its layers be that may be run again in the backward pass."""

OUTGROWN: Final = 2
"""So many times the bytes of what layers were tried with, and steps are another kind of work."""

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class LayerPhase(Enum):
    """What is done with the layers of an Offload.

    OFF to TRIED (a step is bound by the thread), TRIED to ON or REFUSED (its layers have been
    called twice), ON to OFF (steps have grown).
    """

    OFF = "off"
    TRIED = "tried"
    ON = "on"
    REFUSED = "refused"


_NEXT: Final = {
    LayerPhase.OFF: {LayerPhase.TRIED},
    LayerPhase.TRIED: {LayerPhase.ON, LayerPhase.REFUSED},
    LayerPhase.ON: {LayerPhase.OFF},
    LayerPhase.REFUSED: frozenset[LayerPhase](),
}


class LayerReplay:
    """The layers of an Offload's modules: which are run again, and in which phase that is.

    Threads may share it: each has a step of its own, and the layers are hooked as long as one has.
    """

    def __init__(self, layers: Layers, named: Iterable[torch.nn.Module] | None) -> None:
        """Consider the `named` of some layers, or if that is None those that are declared."""
        self._known = layers
        self._named = None if named is None else {id(module) for module in named}
        self._lock = threading.Lock()  # protects what follows
        self._phase = LayerPhase.OFF
        self._layers: list[_Layer] = []
        """The first of the model, which are tried or run again."""
        self._steps = 0
        self._hooked: list[_Layer] = []
        """Those whose forwards are replaced while that many steps are under way."""
        self._local = threading.local()
        self._has_outgrown = False
        self.refusal = ""
        """Why layers are not run again, though that would take the thread the least."""
        self._host: HostBound | None = None
        self._saved_bytes = 0

    @property
    def host(self) -> HostBound | None:
        """What was known of the thread before; None where no layer is run again."""
        return self._host if self._phase is LayerPhase.ON else None

    @property
    def spared_bytes(self) -> int:
        """What a step saved before layers were run again; 0 where none is."""
        return self._saved_bytes if self._phase is LayerPhase.ON else 0

    @property
    def phase(self) -> LayerPhase:
        """What is done now."""
        return self._phase

    @property
    def replayed(self) -> tuple[ReplayedLayer, ...]:
        """The layers that are run again."""
        if self._phase is not LayerPhase.ON:
            return ()
        return tuple(ReplayedLayer(layer.name, layer.nbytes) for layer in self._layers)

    @property
    def share(self) -> float:
        """The part of what a step saves that is made in layers which are run again."""
        nbytes = sum(layer.nbytes for layer in self.replayed)
        return nbytes / self._saved_bytes if nbytes else 0.0

    def consider(self, kind: Kind, host: HostBound, room: int) -> None:
        """Have layers tried in the next step if those of a kind could spare the thread its hooks.

        As many as leave no more than `room` bytes saved, the first ones.
        """
        with self._lock:
            if self._phase is not LayerPhase.OFF:
                return
            layers = list(self._first_of(kind, kind.saved_bytes - room))
            if layers:
                self._layers, self._saved_bytes, self._host = layers, kind.saved_bytes, host
                self._move_to(LayerPhase.TRIED)

    def begins(self) -> bool:
        """Tell, where a step begins, whether steps are another kind from here on."""
        with self._lock:
            if self._phase is LayerPhase.TRIED and all(layer.is_tried for layer in self._layers):
                return self._judge()
            if self._phase is LayerPhase.ON and self._has_outgrown:
                self._has_outgrown = False
                self._move_to(LayerPhase.OFF)
                self._forget()
                return True
            return False

    def step(self, stats: StatsRecorder, mode: TorchFunctionMode | None) -> LayerStep | None:
        """Return what a step whose functions pass through `mode` does; None where nothing."""
        if self._phase not in (LayerPhase.TRIED, LayerPhase.ON):
            return None
        return LayerStep(self, self._phase is LayerPhase.ON, stats, mode)

    # --- for steps --------------------------------------------------------------------------

    def enter(self, step: LayerStep) -> None:
        """Have this thread's calls of the layers go to `step`."""
        with self._lock:
            if not self._steps:
                self._hooked = list(self._layers)
                for layer in self._hooked:
                    layer.hook(self)
            self._steps += 1
        step.outer, self._local.step = getattr(self._local, "step", None), step

    def leave(self, step: LayerStep) -> None:
        """Have them go where they went before; where no step is left they do what they ever did."""
        self._local.step = step.outer
        with self._lock:
            self._steps -= 1
            if not self._steps:
                for layer in self._hooked:
                    layer.unhook()

    def current(self) -> LayerStep | None:
        """Return this thread's step, if nothing has saved-tensor hooks inside of its block."""
        step: LayerStep | None = getattr(self._local, "step", None)
        if step is None or not torch.is_grad_enabled():
            return None
        top = _top_hooks(True)
        return step if top is not None and top[0] == step.pack else None

    def outgrown(self) -> None:
        """Note that a layer was given much more than when it was tried."""
        self._has_outgrown = True

    # --- helpers, with the lock held --------------------------------------------------------

    def _judge(self) -> bool:
        """Go on with the layers that have passed their trials; False where none has."""
        self.refusal = next(filter(None, (layer.refusal for layer in self._layers)), "")
        self._layers = [layer for layer in self._layers if not layer.refusal]
        self._move_to(LayerPhase.ON if self._layers else LayerPhase.REFUSED)
        return bool(self._layers)

    def _move_to(self, phase: LayerPhase) -> None:
        assert phase in _NEXT[self._phase], f"{self._phase} to {phase}"
        self._phase = phase

    def _forget(self) -> None:
        self._layers = []
        self._host, self._saved_bytes = None, 0

    def _first_of(self, kind: Kind, leaving: int) -> Iterator[_Layer]:
        """Yield the first layers that save so many bytes together; all where they save less."""
        if leaving <= 0 or may_be_compiled(self._known.modules):
            return
        sizes: dict[str, int] = {}
        for value in kind.values:
            if value.is_saved:
                sizes[value.layer] = sizes.get(value.layer, 0) + value.nbytes
        for name, module in self._known.whole().items():
            if leaving > 0 and sizes.get(name) and self._may_be_called_twice(module):
                leaving -= sizes[name]
                yield _Layer(name, module, sizes[name])

    def _may_be_called_twice(self, module: torch.nn.Module) -> bool:
        """Tell whether somebody says so of a layer, and nobody watches or shards its parts."""
        if self._named is None:
            says_so = any(base.__name__ == DECLARED for base in type(module).__mro__)
            if not says_so or getattr(module, "gradient_checkpointing", False):
                return False
        elif id(module) not in self._named:
            return False
        return all(map(_is_plain, parts_of([module])))


class LayerStep:
    """One step's calls of the layers, in the thread of its block."""

    def __init__(
        self,
        replay: LayerReplay,
        is_on: bool,
        stats: StatsRecorder,
        mode: TorchFunctionMode | None,
    ) -> None:
        """Run layers again in the backward pass if that `is_on`, else try whether that is right."""
        self._replay = replay
        self._is_on = is_on
        self._stats = stats
        self._mode = mode
        self.pack: object = None
        """The hook that the block has put on PyTorch's stack."""
        self.outer: LayerStep | None = None
        """The step inside of which it is, in the same thread."""

    def begin(self, pack: object) -> None:
        """Begin to see the calls of layers while `pack` is the innermost hook."""
        self.pack = pack
        self._replay.enter(self)

    def end(self) -> None:
        """See no more of them."""
        if self.pack is not None:
            self._replay.leave(self)

    def call(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer's forward returns."""
        has_shown = layer.is_tried and not self._is_on
        if has_shown or layer.refusal or not layer.module.training:
            return layer.forward(*args, **kwargs)
        layer.is_tried = True
        try:
            nbytes = sum(tensor.nbytes for tensor in tensors_in((*args, *kwargs.values())))
        except TypeError as error:
            if not self._is_on:
                layer.refuse(str(error))
            return layer.forward(*args, **kwargs)
        if not self._is_on:
            layer.input_bytes = nbytes
            made, difference = call_twice(
                layer.module, layer.forward, args, kwargs, unseen_by=self._mode
            )
            if difference:
                layer.refuse(difference)
            return made
        if nbytes > OUTGROWN * layer.input_bytes:
            self._replay.outgrown()
        self._stats.of_layer(layer.name).gives_up(layer.nbytes)
        return self._checkpointed(layer, args, kwargs)

    def _checkpointed(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a layer's forward now, and again where something that it saved is asked for."""
        loose = [argument for argument in args if not isinstance(argument, torch.Tensor)]
        held = tensors_in((*loose, *kwargs.values()))
        again = _Again(layer, held, self._stats)
        return checkpoint(
            partial(layer.forward, **kwargs),
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), again),
        )


class _Layer:
    """A layer's place in its module: stands there as its `forward` while steps are under way."""

    def __init__(self, name: str, module: torch.nn.Module, nbytes: int) -> None:
        self.name = name
        self.module = module
        self.nbytes = nbytes
        self.input_bytes = 0
        """Of the tensors that it was given when it was tried."""
        self.is_tried = False
        self.refusal = ""
        self.forward: Callable[..., Any] = module.forward
        self._replay: LayerReplay | None = None
        self._before: Callable[..., Any] | None = None

    def hook(self, replay: LayerReplay) -> None:
        """Stand in for the module's forward."""
        self._replay = replay
        self._before = self.module.__dict__.get("forward")
        self.forward = self.module.forward
        self.module.__dict__["forward"] = self

    def unhook(self) -> None:
        """Give its forward back, unless somebody else has put another there."""
        if self.module.__dict__.get("forward") is not self:
            return
        if self._before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._before

    def refuse(self, reason: str) -> None:
        """Note why it cannot be run again."""
        self.refusal = self.refusal or f"{self.name} is not run again: {reason}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what this thread's step does with a call."""
        step = None if self._replay is None else self._replay.current()
        return self.forward(*args, **kwargs) if step is None else step.call(self, args, kwargs)


class _Again:
    """The context in which a layer's forward is called in the backward pass.

    Raises on entry:
        ActivationLost: what it reads is not as it was in the forward pass.
    """

    def __init__(self, layer: _Layer, held: Sequence[torch.Tensor], stats: StatsRecorder) -> None:
        """Note the present versions of what the layer has and of the tensors `held` for it.

        Those among its arguments themselves are saved, and watched with that.
        """
        self._layer = layer
        self._stats = stats
        self._parts = list(parts_of([layer.module]))
        self._states = [state_of(part) for part in self._parts]
        self._tensors = [(tensor, tensor._version) for tensor in held]
        self._began = 0.0

    def __enter__(self) -> None:
        self._check()
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stats.replayed(perf_counter() - self._began)

    def _check(self) -> None:
        for part, state in zip(self._parts, self._states, strict=True):
            if state_of(part) != state:
                raise ActivationLost(
                    f"a parameter, a buffer or the mode of {self._layer.name} was changed between "
                    "the forward and the backward pass, which was to run that layer again; change "
                    "it after the backward pass, or pass offload(..., layers=[])"
                )
        for tensor, version in self._tensors:
            if tensor._version != version:
                raise ActivationLost(
                    f"a tensor of shape {list(tensor.shape)} that {self._layer.name} was given was "
                    "changed in place before the backward pass, which was to run that layer again; "
                    "change a copy of it, or pass offload(..., layers=[])"
                )


def _is_plain(part: torch.nn.Module) -> bool:
    """Tell whether a module's tensors are ordinary ones, and nobody is told of its calls."""
    return not (part._forward_hooks or part._forward_pre_hooks) and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in own_tensors(part)
    )
