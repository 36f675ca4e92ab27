"""The graph of one call of a layer: on what it hangs, and how often.

What a node of its own is to stand for must give each tensor the gradients that the graph itself
would give it, one by one and in their order: autograd adds up what all users of a tensor send, the
latest first, and another order makes other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import torch

__all__ = ["Cut", "Use", "gradients_of", "stand_in", "uncached_casts", "uses_of"]

Use = tuple[Any, int]
"""A node, and which of its gradients goes to the tensor."""

_Accumulate: Final = type(
    torch.empty(1, requires_grad=True).expand(2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
)
"""Of the nodes that a graph ends with at parameters."""


@dataclass(frozen=True)
class Cut:
    """How the graph of a layer's calls hangs on its sources: what it is given, and what it has."""

    needed: tuple[bool, ...]
    """Which of the sources need gradients."""
    slots: tuple[int, ...]
    """How many gradients each of those may get: as often as it is used, once at least."""
    place: int | None
    """Of the one result that needs a gradient in what the forward returns; None if it is that."""

    def result(self, made: Any) -> Any:
        """Return that result of what a forward has returned."""
        return made if self.place is None else made[self.place]

    @classmethod
    def of(cls, made: Any, sources: Sequence[torch.Tensor], first: int) -> Cut | None:
        """Return that of a call which has `made` something, by nodes from a sequence number on.

        None if one node could not stand for its graph.
        """
        place = _place_of_result(made)
        if place == _NOWHERE:
            return None
        result: torch.Tensor = made if place is None else made[place]
        if result._is_view() or result.grad_fn._sequence_nr() < first:  # type: ignore[union-attr]
            return None
        needed = tuple(source.requires_grad for source in sources)
        ends = list(compress(sources, needed))
        if len(set(map(id, ends))) < len(ends):
            return None  # one would have two nodes at which the graph ends
        if any(end.layout is not torch.strided for end in ends):
            return None  # of which nothing can stand in
        uses = uses_of(result, ends, first)
        if uses is None:
            return None
        return cls(needed, tuple(max(1, len(used)) for used in uses), place)


_NOWHERE: Final = -1


def _place_of_result(made: Any) -> int | None:
    """Return where in what a forward returns the one result is that needs a gradient.

    None if that is all it returns; nowhere if there are several or none.
    """
    if type(made) is torch.Tensor:
        return None if made.requires_grad else _NOWHERE
    if type(made) not in (tuple, list):
        return _NOWHERE
    places = [
        place for place, one in enumerate(made) if type(one) is torch.Tensor and one.requires_grad
    ]
    others = (one for place, one in enumerate(made) if places != [place])
    is_one = len(places) == 1 and all(
        one is None or (type(one) is torch.Tensor and not one.requires_grad) for one in others
    )
    return places[0] if is_one else _NOWHERE


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a call is given in the place of a tensor, so that its graph ends there.

    That for a result is no leaf of the graph: autocast would keep the casts of it.
    """
    if not tensor.requires_grad:
        return tensor
    apart = tensor.detach().requires_grad_()
    return apart if tensor.is_leaf else apart.view_as(apart)


def uses_of(
    result: torch.Tensor, sources: Sequence[torch.Tensor], first: int
) -> list[list[Use]] | None:
    """Return where a result's graph uses each source.

    None if it ends somewhere else, or goes on in what this thread made before the sequence number
    `first`. Each thread has its own: what another has made is followed to where it ends.
    """
    leaves = {id(one): index for index, one in enumerate(sources) if one.is_leaf}
    known: dict[Any, int] = {
        (one.grad_fn, one.output_nr): index for index, one in enumerate(sources) if not one.is_leaf
    }
    uses: list[list[Use]] = [[] for _ in sources]
    left: list[Any] = [result.grad_fn]
    met = set(left)
    while left:
        node = left.pop()
        for slot, edge in enumerate(node.next_functions):
            source = known.get(edge)
            if source is not None:
                uses[source].append((node, slot))
                continue
            following = edge[0]
            if following is None or following in met:
                continue
            if type(following) is _Accumulate:
                source = leaves.get(id(following.variable))  # type: ignore[union-attr]
                if source is None:
                    return None
                known[edge] = source
                uses[source].append((node, slot))
            elif following._sequence_nr() < first:
                return None
            else:
                met.add(following)
                left.append(following)
    return uses


def gradients_of(
    result: torch.Tensor,
    gradient: torch.Tensor,
    sources: Sequence[torch.Tensor],
    uses: Sequence[Sequence[Use]],
) -> list[list[torch.Tensor | None]]:
    """Return what each use of a source sends it, as the backward pass makes them, in its order."""
    sent: list[list[torch.Tensor | None]] = [[] for _ in sources]
    shared: dict[Any, list[tuple[int, int]]] = {}
    for source, used in enumerate(uses):
        if len(used) > 1:
            for node, slot in used:
                shared.setdefault(node, []).append((slot, source))
    for node, slots in shared.items():
        node.register_hook(_taking(sorted(slots), sent))
    reached = [index for index, used in enumerate(uses) if used]
    sums = torch.autograd.grad(
        result,
        [sources[index] for index in reached],
        gradient,
        allow_unused=True,
    )
    for index, whole in zip(reached, sums, strict=True):
        if len(uses[index]) == 1:
            sent[index].append(whole)
    return sent


def _taking(slots: Sequence[tuple[int, int]], sent: Sequence[list[torch.Tensor | None]]) -> Any:
    """Return a hook of a node that puts some of its gradients apart, so that nothing adds them."""

    def take(gradients: Sequence[torch.Tensor | None], _: object) -> tuple[Any, ...]:
        left = list(gradients)
        for slot, source in slots:
            sent[source].append(left[slot])
            left[slot] = None
        return tuple(left)

    return take


@contextmanager
def uncached_casts() -> Iterator[None]:
    """Have autocast cast anew: what it has kept belongs to another graph, or to none."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
