"""A call of a layer that leaves no graph: one node stands for it, which makes the graph again.

Its forward records nothing, so that nothing is saved and no hook is run; that takes the thread less
than a call that nobody makes again. The backward pass calls the forward once more, goes back
through that graph, and hands on what each use of a tensor gives, so that sums have the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import compress
from time import perf_counter
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from storm_client.blocks import Stacks
from storm_client.plan.layer_call import HookedCall
from storm_client.plan.layer_graph import Cut, gradients_of, stand_in, uncached_casts, uses_of
from storm_client.plan.layer_state import Arguments, Call, CallState
from storm_client.settings import kinds_of_casts

__all__ = ["CutCall", "Graphs", "LayerCalls"]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_next_number = torch._C._autograd._get_sequence_nr
_current_pass = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


@dataclass
class Graphs:
    """Whether all calls of some layers leave graphs."""

    are_needed: bool = False


class LayerCalls:
    """The calls of one layer that may be made again: which of them leave a graph.

    By that, what those are given tells how often the layer uses it, so the first of a kind does.
    """

    def __init__(self, graphs: Graphs) -> None:
        """Have all calls leave graphs; be one of several layers that `graphs` is said for."""
        self.of_all = graphs
        self._need_graphs = True
        self._cuts: dict[Hashable, Cut | None] = {}
        """By the kind of a call; None where one node cannot stand for its graph."""
        self._last: Callable[[], HookedCall | CutCall | None] = _nothing

    @property
    def needs_graphs(self) -> bool:
        """Whether all calls leave graphs."""
        return self._need_graphs or self.of_all.are_needed

    def need_no_graphs(self) -> None:
        """Have calls leave none where one node can stand for it."""
        self._need_graphs = False

    def need_graphs(self) -> None:
        """Have all calls leave graphs from here on."""
        self._need_graphs = True

    def run(self, call: Call, own: Iterable[torch.Tensor], arguments: Arguments) -> Any:
        """Return what a call returns that is given arguments, by a layer of its `own` tensors."""
        own = list({id(tensor): tensor for tensor in own}.values())
        casts = kinds_of_casts()
        if any(is_enabled for _, is_enabled, _ in casts):
            self._look_for_shared_casts()
        if self.needs_graphs or any(map(_hooks_of, own)):
            return self._hooked(call)(arguments)
        places = {id(one): -place for place, one in enumerate(own, 1)}
        kind = _kind_of(arguments, places), tuple(one.requires_grad for one in own), casts
        if kind in self._cuts:
            cut = self._cuts[kind]
            made = self._hooked(call) if cut is None else CutCall(self, call, cut, own)
            self._last = weakref.ref(made)
            return made(arguments)
        first = _next_number()
        result = self._hooked(call)(arguments)
        if len(self._cuts) < MOST_KINDS:
            given = call.state.given(CallState.saved_of(arguments[0]))
            self._cuts[kind] = Cut.of(result, [*given, *own], first)
        return result

    def _hooked(self, call: Call) -> HookedCall:
        made = HookedCall(call)
        self._last = weakref.ref(made)
        return made

    def _look_for_shared_casts(self) -> None:
        """Have calls leave graphs where one begins before another's backward pass has ended.

        Both might use one cast of a parameter, whose gradients are then added before they are cast.
        """
        last = self._last()
        if last is not None:
            self.of_all.are_needed = True
            if isinstance(last, CutCall):
                last.may_share_casts = True


MOST_KINDS: Final = 1_000
"""Of what calls are given, as lengths of sequences."""


def _kind_of(argument: Any, places: dict[int, int]) -> Hashable:
    """Return what is alike of arguments by which a layer uses the same tensors as often.

    `places` numbers tensors by id, those that the layer has and what it was given so far: one that
    is given twice is used as often as two.
    """
    if isinstance(argument, torch.Tensor):
        place = places.setdefault(id(argument), len(places))
        return argument.shape, argument.dtype, argument.requires_grad, place
    if isinstance(argument, dict):
        return tuple((name, _kind_of(value, places)) for name, value in argument.items())
    if isinstance(argument, (tuple, list)):
        return tuple(_kind_of(one, places) for one in argument)
    return type(argument), argument


def _nothing() -> None:
    """Stand in for a reference to no call."""


def _hooks_of(tensor: torch.Tensor) -> object:
    """Return what is told of a tensor's gradient, which a second graph would tell once more."""
    return tensor._backward_hooks


class CutCall:
    """A call in the forward pass, and those that follow from it in backward passes."""

    def __init__(
        self, calls: LayerCalls, call: Call, cut: Cut, own: Sequence[torch.Tensor]
    ) -> None:
        """Be one of some calls, whose graph hangs as `cut` says on what a layer has of its own."""
        self._calls = calls
        self._call = call
        self._state = call.state
        self._cut = cut
        self._own = own
        self.may_share_casts = False
        """Whether the layer was called again under autocast before this call's backward pass."""

    def __call__(self, arguments: Arguments) -> Any:
        """Return what the forward returns."""
        cut = self._cut
        saved = CallState.saved_of(arguments[0])
        sources = self._needed(self._state.given(saved))
        slots = [
            source for source, count in zip(sources, cut.slots, strict=True) for _ in range(count)
        ]
        made: list[Any] = []
        result = _Node.apply(self, made, arguments, saved, *slots)  # type: ignore[no-untyped-call]
        if cut.place is None:
            return result
        (whole,) = made
        return type(whole)([*whole[: cut.place], result, *whole[cut.place + 1 :]])

    def run(self, made: list[Any], arguments: Arguments) -> Any:
        """Call the forward while nothing is recorded; put all that it returns into `made`."""
        args, kwargs = arguments
        with uncached_casts():
            made.append(self._call.forward(*args, **kwargs))
        return self._cut.result(made[0])

    def gradients(
        self, saved: Sequence[torch.Tensor], gradient: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Return what each slot of the node gets.

        Raises:
            ActivationLost: what the layer reads is not as it was in the forward pass, or it makes
                something else; or these are to be differentiated themselves.
        """
        self._state.check()
        if torch.is_grad_enabled():
            self._calls.of_all.are_needed = True
            raise self._state.cannot_be_called_again("gradients of its gradients are asked for")
        if self.may_share_casts:
            raise self._state.cannot_be_called_again(
                "it was called once more under autocast, before the backward pass of this call"
            )
        given = self._state.given(saved)
        began = perf_counter()
        first = _next_number()
        try:
            with self._state.surroundings(), _unhooked():
                instead = {id(tensor): stand_in(tensor) for tensor in given}
                args, kwargs = self._state.arguments(given, instead)
                result = self._cut.result(self._call.forward(*args, **kwargs))
        finally:
            self._call.stats.replayed(perf_counter() - began)
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            raise self._state.did_otherwise("it returned something else")
        if result.shape != gradient.shape:
            shapes = f"{list(result.shape)} instead of one of {list(gradient.shape)}"
            raise self._state.did_otherwise(f"it returned a tensor of shape {shapes}")
        sources = self._needed(list(instead.values()))
        uses = uses_of(result, sources, first)
        if uses is None:
            raise self._state.did_otherwise("it used a tensor that it did not use before")
        sent = gradients_of(result, gradient, sources, uses)
        slots: list[torch.Tensor | None] = []
        for source, count, gradients in zip(
            self._needed(given), self._cut.slots, sent, strict=True
        ):
            found = gradients if len(gradients) <= count else [self._sum(source, gradients)]
            slots += found + [None] * (count - len(found))
        return slots

    def _sum(
        self, source: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> torch.Tensor | None:
        """Return the sum of more gradients than a source has slots, as experts' weights may get.

        It has the right bits if nothing else uses the source: that is looked at when it gets there.
        """
        found = [one for one in gradients if one is not None]
        if not found:
            return None
        total = reduce(torch.add, found)
        backward = _current_pass()

        def look(arrived: torch.Tensor) -> None:
            handle.remove()  # in a later pass, if an exception has ended this one
            if backward == _current_pass() and arrived.data_ptr() != total.data_ptr():
                raise self._state.did_otherwise(
                    f"it used a tensor of shape {list(source.shape)} more often, which is used "
                    "elsewhere too"
                )

        handle = source.register_hook(look)  # type: ignore[no-untyped-call]  # torch's gap
        return total

    def _needed(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sources that need a gradient."""
        return list(compress((*given, *self._own), self._cut.needed))


class _Node(torch.autograd.Function):
    """The node that stands for a call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CutCall,
        made: list[Any],
        arguments: Arguments,
        saved: list[torch.Tensor],
        *slots: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.count = call, len(slots)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        result: torch.Tensor = call.run(made, arguments)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        (gradient,) = gradients
        if gradient is None:
            return (None,) * (_OTHERS + ctx.count)
        stacks = Stacks()
        try:
            found = ctx.call.gradients(saved, gradient)
        except BaseException:
            stacks.restore()
            raise
        if not _keeps_graph():
            ctx.call = None
        return (*(None,) * _OTHERS, *found)


_OTHERS: Final = 4
"""What the node is given besides its slots."""


def _unhooked() -> AbstractContextManager[object]:
    """Return a context in which hooks that are on this thread's stack are handed nothing."""
    if _top_hooks(True) is None:
        return nullcontext()
    return saved_tensors_hooks(torch.Tensor.detach, _as_it_is)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
