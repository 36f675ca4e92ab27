"""Runs whole layers again in the backward pass, where a step waits for the thread that trains.

Hooks and recipes take that thread some time for each tensor. A step of small operations, whose
device waits for the thread, gets longer by that than by handing over nothing that is saved inside
of a layer, and calling its forward a second time. So there that is done with the first layers, as
many as the budget asks for; `layer_call.py` has one such call. Those behind them stay; the backward
pass has freed them by the time that the first are run again.

A forward is somebody else's Python code, and to call it twice is right only if it does the same
twice. So it is done to layers alone that are made for it (transformers' GradientCheckpointingLayer)
or that the user has named, and each has to show it: in one step it is called twice in the forward
pass, what its functions return is compared, and so is what its modules hold before and after. What
has shown it is trusted as long as it has the same modules in the same modes, of whose calls nobody
is told. And where anything that it reads was changed before the backward pass, that raises, as it
does in PyTorch for what is saved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from storm_client.blocks import Stacks
from storm_client.compiled import CompiledParts, may_be_compiled
from storm_client.layers import Layers, parts_of
from storm_client.plan.decisions import ReplayedLayer
from storm_client.plan.kinds import HostBound, Kind
from storm_client.plan.layer_cut import Graphs
from storm_client.plan.layer_forward import LayerForward, are_plain, nbytes_of
from storm_client.plan.layer_snapshots import own_tensors, tensors_in
from storm_client.plan.layer_state import Call, CallState
from storm_client.plan.layer_trial import call_twice
from storm_client.plan.pace import Pace
from storm_client.settings import settings_of_kernels
from storm_client.watching import are_altered

if TYPE_CHECKING:
    from storm_client.stats import StatsRecorder

__all__ = ["LayerPhase", "LayerReplay", "LayerStep"]

DECLARED: Final = "GradientCheckpointingLayer"
"""What transformers has its layers be that may be run again in the backward pass."""

SLOWER: Final = 1.02
"""So many times as long as with its tensors handed over, and a step has its layers' tensors handed
over again. What either takes was not known before: it depends on the device as on the thread."""

OUTGROWN: Final = 2
"""So many times the bytes of what layers were tried with, and steps are another kind of work."""

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class LayerPhase(Enum):
    """What is done with the layers of an Offload.

    OFF to TRIED (a step is bound by the thread), TRIED to ON or REFUSED (its layers have been
    called twice), ON to OFF (steps have grown, or layers are others now); TRIED and ON to OFF (what
    steps run may be compiled); ON to REFUSED (steps take longer than before).
    """

    OFF = "off"
    TRIED = "tried"
    ON = "on"
    REFUSED = "refused"


_NEXT: Final = {
    LayerPhase.OFF: {LayerPhase.TRIED},
    LayerPhase.TRIED: {LayerPhase.ON, LayerPhase.REFUSED, LayerPhase.OFF},
    LayerPhase.ON: {LayerPhase.OFF, LayerPhase.REFUSED},
    LayerPhase.REFUSED: frozenset[LayerPhase](),
}


class LayerReplay:
    """The layers of an Offload's modules: which are run again, and in which phase that is.

    Threads may share it: each has a step of its own, and the layers are hooked as long as one has.
    """

    def __init__(self, layers: Layers, named: Iterable[torch.nn.Module] | None, pace: Pace) -> None:
        """Consider the `named` of some layers, or if that is None those that are declared.

        `pace` tells what steps take.
        """
        self._known = layers
        self._pace = pace
        self._named = None if named is None else {id(module) for module in named}
        self._lock = threading.Lock()  # protects what follows
        self._phase = LayerPhase.OFF
        self._compiled = CompiledParts()
        self._graphs = Graphs()
        self._layers: list[LayerForward] = []
        """The first of the model, which are tried or run again."""
        self._refused: set[int] = set()
        """Ids of layers that are not tried again."""
        self._steps = 0
        self._hooked: list[LayerForward] = []
        """Those whose forwards are replaced while that many steps are under way."""
        self._local = threading.local()
        self._has_outgrown = False
        self.refusal = ""
        """Why layers are not run again, though that would take the thread the least."""
        self._host: HostBound | None = None
        self._saved_bytes = 0
        self._before: float | None = None
        """Seconds of a step while layers' tensors were handed over, until that is compared."""

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
                self._before = self._pace.seconds
                self._move_to(LayerPhase.TRIED)

    def begins(self) -> bool:
        """Tell, where a step begins, whether steps are another kind from here on.

        What is compiled is left alone: the compiler would look into the calls of layers.
        """
        with self._lock:
            self._layers = [layer for layer in self._layers if layer.identity]
            if self._phase is LayerPhase.TRIED and all(layer.is_tried for layer in self._layers):
                return self._judge()
            is_open = self._phase in {LayerPhase.TRIED, LayerPhase.ON}
            if is_open and (self._has_outgrown or self._compiled.may_run(self._known.modules)):
                return self._end()
            return self._phase is LayerPhase.ON and self._is_slower()

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
        """Return this thread's step, if nothing has saved-tensor hooks inside of its block.

        None where modes of the script may alter what functions return, or weights that are computed
        are kept for other layers: a later call of the layer would be made outside of that.
        """
        step: LayerStep | None = getattr(self._local, "step", None)
        if step is None or not torch.is_grad_enabled() or _is_transformed() or are_altered():
            return None
        if parametrize._cache_enabled:
            return None
        top = _top_hooks(True)
        return step if (None if top is None else top[0]) == step.pack else None

    def outgrown(self) -> None:
        """Note that a layer was given much more than when it was tried."""
        self._has_outgrown = True

    def shares(self, own: Iterable[torch.Tensor], parts: Iterable[torch.nn.Module]) -> bool:
        """Tell whether modules that are none of a layer's `parts` have tensors of its `own` too."""
        inside, ids = set(map(id, parts)), set(map(id, own))
        others = [part for part in parts_of(self._known.modules) if id(part) not in inside]
        return any(id(tensor) in ids for tensor in own_tensors(others))

    # --- helpers, with the lock held --------------------------------------------------------

    def _judge(self) -> bool:
        """Go on with the layers that have passed their trials; False where none has."""
        self.refusal = next(filter(None, [layer.judged() for layer in self._layers]), "")
        self._layers = [layer for layer in self._layers if not layer.refusal]
        self._move_to(LayerPhase.ON if self._layers else LayerPhase.REFUSED)
        return bool(self._layers)

    def _end(self) -> bool:
        """Begin anew; True if layers were run again so far."""
        was_on = self._phase is LayerPhase.ON
        refused = [layer for layer in self._layers if layer.refusal]
        self._refused.update(layer.identity for layer in refused)
        self.refusal = next((layer.refusal for layer in refused), self.refusal)
        self._has_outgrown = False
        self._move_to(LayerPhase.OFF)
        self._forget()
        return was_on

    def _is_slower(self) -> bool:
        """Call layers again no more if steps take longer; True then. That is looked at once."""
        before = self._before
        seconds = None if before is None else self._pace.seconds
        if before is None or seconds is None:
            return False
        self._before = None
        if seconds <= SLOWER * before:
            return False
        self.refusal = (
            f"layers are not run again: with that a step took {seconds * 1e3:.4g} ms, and with "
            f"their tensors handed over {before * 1e3:.4g}"
        )
        self._move_to(LayerPhase.REFUSED)
        self._forget()
        return True

    def _move_to(self, phase: LayerPhase) -> None:
        assert phase in _NEXT[self._phase], f"{self._phase} to {phase}"
        self._phase = phase

    def _forget(self) -> None:
        self._layers = []
        self._host, self._saved_bytes, self._before = None, 0, None

    def _first_of(self, kind: Kind, leaving: int) -> Iterator[LayerForward]:
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
                yield LayerForward(name, module, sizes[name], self._graphs)

    def _may_be_called_twice(self, module: torch.nn.Module) -> bool:
        """Tell whether somebody says so of a layer, and nobody watches or shards its parts."""
        if id(module) in self._refused:
            return False
        if self._named is None:
            says_so = any(base.__name__ == DECLARED for base in type(module).__mro__)
            if not says_so or getattr(module, "gradient_checkpointing", False):
                return False
        elif id(module) not in self._named:
            return False
        parts = list(parts_of([module]))
        if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
            return False
        return are_plain(parts, own_tensors(parts))


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
        """The hook that the block has put on PyTorch's stack, if any."""
        self._has_begun = False
        self.outer: LayerStep | None = None
        """The step inside of which it is, in the same thread."""
        self._tried: list[LayerForward] = []
        """What has been tried in it."""

    def begin(self, pack: object = None) -> None:
        """Begin to see the calls of layers while `pack` is the innermost hook, or there is none."""
        self.pack, self._has_begun = pack, True
        self._replay.enter(self)

    def end(self) -> None:
        """See no more of them."""
        for layer in self._tried:
            layer.lets_go()
        if self._has_begun:
            self._replay.leave(self)

    def call(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer's forward returns."""
        if layer.refusal or not layer.module.training:
            return layer.forward(*args, **kwargs)
        stacks = Stacks()
        try:
            return (self._replayed_call if self._is_on else self._try)(layer, args, kwargs)
        except BaseException:
            stacks.restore()
            raise

    def _try(self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Find out whether a layer may be run again, which is open where its forward raises."""
        if layer.is_tried:
            layer.look_back()
            layer.calls.need_graphs()
            return layer.forward(*args, **kwargs)
        parts = list(parts_of([layer.module]))
        try:
            tensors = tensors_in((*args, *kwargs.values()))
        except TypeError as error:
            layer.refuse(str(error))
            return layer.forward(*args, **kwargs)
        own = own_tensors(parts)
        if not are_plain(parts, own):
            layer.refuse("somebody has hooks on the calls of its modules")
        if len({tensor.device for tensor in own}) > 1:  # each has a backward thread of its own
            layer.refuse("its parameters and buffers lie on several devices")
        if layer.refusal or _cannot_be_saved(tensors):
            return layer.forward(*args, **kwargs)
        trial = call_twice(
            layer.module, layer.forward, args, kwargs, name=layer.name, unseen_by=self._mode
        )
        layer.passes(parts, tensors)
        if trial.needs_no_graph and not self._replay.shares(own, parts):
            layer.calls.need_no_graphs()
        self._tried.append(layer)
        if trial.difference:
            layer.refuse(trial.difference)
        else:
            _look_at_backward_pass(layer, trial.made)
        return trial.made

    def _replayed_call(
        self, layer: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a layer's forward now, and again where something that it saved is asked for."""
        try:
            tensors = tensors_in((*args, *kwargs.values()))
        except TypeError:
            return layer.forward(*args, **kwargs)
        if _cannot_be_saved(tensors):
            return layer.forward(*args, **kwargs)
        module = layer.module
        passed = layer.passed(module)
        if passed is None or nbytes_of(tensors) > OUTGROWN * layer.input_bytes:
            self._replay.outgrown()
        if passed is None:
            return layer.forward(*args, **kwargs)
        self._stats.of_layer(layer.name).gives_up(layer.nbytes)
        attributes, own = passed
        state = CallState(layer.name, attributes, module, own, (args, kwargs))
        call = Call(state, layer.forward, self._stats)
        return layer.calls.run(call, own + attributes.tensors, (args, kwargs))


def _look_at_backward_pass(layer: LayerForward, made: Any) -> None:
    """Have a layer not be run again if the backward pass of its trial runs in other settings.

    As that of a script does which chooses attention's kernels for the forward pass alone. Have its
    calls leave graphs if gradients are to be differentiated themselves.
    """
    results = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
    device = "cuda" if any(one.is_cuda for one in results) else "cpu"
    settings = settings_of_kernels(device)

    def look(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            layer.calls.of_all.are_needed = True
        if settings_of_kernels(device) != settings:
            layer.refuse(
                "settings of PyTorch (attention kernels, cuDNN, precision, default dtype, "
                "determinism, number of threads) are others in the backward pass than in the "
                "forward pass"
            )

    for one in results:
        if one.requires_grad:
            one.register_hook(look)  # type: ignore[no-untyped-call]  # torch's gap


def _is_transformed() -> bool:
    """Tell whether a transform of torch.func is under way, as vmap, or forward differentiation.

    The backward pass, which may call a layer again, may be outside of that.
    """
    is_forward = forward_ad._current_level >= 0
    return is_forward or torch._C._functorch.peek_interpreter_stack() is not None


def _cannot_be_saved(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether autograd saves none of some tensors, or a CUDA graph holds what is saved."""
    if any(map(torch.Tensor.is_inference, tensors)):
        return True
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()
