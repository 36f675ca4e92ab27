"""Finds out whether the graph alone holds a saved tensor; in doubt, it does not.

A backward pass may write its gradient over a saved tensor that nothing can read again. C++ counts
references to tensors and storages, and Python counts references to their objects. The counts of a
tensor that only the graph holds are found once, by example, since they differ among versions of
PyTorch and Python. Any other count means that something else may hold the tensor.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from storm_client.saved.versions import KeptTensor

__all__ = ["Keeper", "is_held_by_graph_alone", "keeper_of"]


class Keeper(Enum):
    """What holds a tensor for autograd, as far as this affects the counts."""

    GRAPH = "autograd itself"
    """Or unknown hooks, which hold an object whose counts never match."""
    PYTHON = "KeptTensor"
    COMPILED = "Kept"
    """Both until it is offloaded: then a holder of the original counts as much as the token did."""


_use_count = torch._C._storage_Use_Count
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)


def keeper_of(ctx: Any) -> Keeper:
    """Return, in a backward pass, what holds the first saved tensor.

    For versions of PyTorch that do not show what hooks returned, the result is the graph.
    """
    saved = ctx._raw_saved_tensors[0]
    if getattr(saved, "unpack_hook", None) is None:
        return Keeper.GRAPH
    if isinstance(saved.data, KeptTensor):
        return Keeper.PYTHON if saved.data.moved is None else Keeper.GRAPH
    is_compiled = type(saved.data).__qualname__ == Keeper.COMPILED.value
    return Keeper.COMPILED if is_compiled and saved.data.token is not None else Keeper.GRAPH


def is_held_by_graph_alone(
    saved: list[Any], keeper: Keeper = Keeper.GRAPH, *, aliased: bool = False
) -> bool:
    """Return, in a backward pass, whether its first saved tensor may be written to.

    This requires a contiguous result of an operation, or a view of one, that nothing can read
    again. No variable, weak reference, other tensor on its storage or other operation holds it, the
    memory is PyTorch's own, and this backward pass frees the graph. A stream that still reads it is
    not noticed if only the allocator was informed (`Tensor.record_stream`).

    Args:
        saved: `list(ctx.saved_tensors)`, the only reference to them; hooks may allow only one
            unpack.
        keeper: what holds the tensor for the graph.
        aliased: whether the `detach` of the result was saved, rather than the result.
    """
    if _keeps_graph is None or _keeps_graph():
        return False
    if (
        (saved[0].is_leaf and not aliased)
        or not saved[0].is_contiguous()
        or _is_shared_memory(saved[0].untyped_storage())
    ):
        return False
    # For the result of an operation, compiled code makes a new alias at each unpack, as Python
    # does. For other tensors, compiled code counts as autograd itself does, and Python keeps the
    # object.
    by_python = keeper is Keeper.PYTHON or (keeper is Keeper.COMPILED and not aliased)
    return _counts(saved) in _counts_of_nobody_else(by_python, aliased)


def _is_shared_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether the memory is NumPy's, DLPack's or shared with another process."""
    return not storage.resizable() or (storage.device.type == "cpu" and storage.is_shared())


def _counts(saved: list[Any]) -> tuple[int, ...]:
    """Count the references to the first saved tensor, its storage and its base.

    Python's count is taken of a fresh look-up, never of a variable. Whether an argument is counted
    once or twice depends on the evaluator of the frame, which torch.compile changes.
    """
    held = [saved[0].untyped_storage(), saved[0]._base]
    found = [getrefcount(saved[0]), saved[0]._use_count(), weakref.getweakrefcount(saved[0])]
    found += [getrefcount(held[0]), _use_count(held[0]._cdata), weakref.getweakrefcount(held[0])]
    if held[1] is not None:
        found += [getrefcount(held[1]), held[1]._use_count(), weakref.getweakrefcount(held[1])]
    return tuple(found)


class _Example(torch.autograd.Function):
    """Counts in its backward pass the references to its saved tensor."""

    @staticmethod
    def forward(
        ctx: Any, place: Tensor, saved: list[Tensor], found: list[tuple[int, ...]]
    ) -> Tensor:
        ctx.save_for_backward(saved.pop() if saved else place)
        ctx.found = found
        return place.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        saved = list(ctx.saved_tensors)
        ctx.found.append(_counts(saved))
        return gradient.expand_as(saved[0]), None, None


@lru_cache(maxsize=4)
def _counts_of_nobody_else(by_python: bool, aliased: bool) -> frozenset[tuple[int, ...]]:
    """Return the counts of a result, and of a view of one, that only the graph holds.

    They are found once, by example, since they differ among versions of PyTorch and Python. A
    separate thread does this, since it has none of the caller's hooks and modes.
    """
    found: list[tuple[int, ...]] = []

    def count() -> None:
        leaf = torch.ones(4, requires_grad=True)
        apply: Any = _Example.apply
        with saved_tensors_hooks(KeptTensor.keeping, _token) if by_python else nullcontext():
            for shape in ((4,), (2, 2)):
                result = leaf * 2
                alias = [result.detach()] if aliased else []
                place = result if shape == (4,) else result.view(shape)
                if aliased and place is not result:
                    alias = [alias[0].view(shape)]
                loss = apply(place, alias, found)
                del result, place
                loss.backward()

    thread = threading.Thread(target=count, name="storm-holder-counts")
    thread.start()
    thread.join()
    return frozenset(found)


_token = attrgetter("token")
