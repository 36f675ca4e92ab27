"""The storages that a step's operations create: when each is needed, and the bytes at each time.

A storage is needed from the operation that creates it, or begins to fetch it, to the last operation
that uses it. Time is counted in operations, from 1 on.

A layout says how little memory an allocator could use; the step's memory is not laid out so. It has
all temporaries in one buffer. Those that are needed at the same time do not overlap. They are
placed one after the other, each at the lowest free offset, in a few orders. The best result counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from storm_client.compile.operators import FETCH, STORE, WAIT
from storm_client.step.nodes import memories

__all__ = ["Layout", "Lifetimes", "Temporary", "laid_out", "most_at_once", "peak_of"]

ALIGNMENT_BYTES = 64
"""PyTorch's allocator for CPUs aligns tensors to this, and vector instructions read fastest
there."""


@dataclass(slots=True)
class Temporary:
    """A storage, created by `operation` and needed from time `begin` up to `end`, exclusive."""

    operation: str
    memory: int
    begin: int
    end: int
    nbytes: int = 0


class Lifetimes:
    """Goes through operations in order, and notes when storages are created and used."""

    def __init__(self) -> None:
        self._time = 0
        self._all: list[Temporary] = []
        self._current: dict[int, Temporary] = {}
        """The latest temporary of each memory, by its number: another graph may create it again."""

    def run(self, nodes: Iterable[fx.Node]) -> None:
        """Go through the nodes of one graph."""
        made: set[int] = set()
        for node in nodes:
            if node.op == "call_function":
                self._time += 1
                made |= self._make(node, made)
            if node.op != "placeholder":
                self._use(_read_by(node) | _memory_of(node))

    def keep(self, nodes: Iterable[fx.Node]) -> None:
        """Make the storages of some nodes live to the end."""
        for node in nodes:
            self._use(memories(node))

    def found(self) -> list[Temporary]:
        """Return the temporaries that have bytes, in the order of creation."""
        return [one for one in self._all if one.nbytes]

    def _make(self, node: fx.Node, made: set[int]) -> frozenset[int]:
        """Note the storages that an operation creates and the graph did not have; return them."""
        if node.target is STORE:
            return frozenset()
        new = _memory_of(node) - made
        if node.target not in _RESTORING:
            new -= _read_by(node)
        for memory in sorted(new):
            one = Temporary(str(node.target), memory, self._time, self._time + 1)
            self._all.append(one)
            self._current[memory] = one
        for memory, nbytes in _sizes(node):
            if memory in self._current:
                self._current[memory].nbytes = max(self._current[memory].nbytes, nbytes)
        return new

    def _use(self, memory: frozenset[int]) -> None:
        for one in memory & self._current.keys():
            self._current[one].end = self._time + 1


_RESTORING = (FETCH, WAIT)
"""Operators whose result has the memory of the value that their token stands for."""


def _memory_of(node: fx.Node) -> frozenset[int]:
    token = node.args[0] if node.target in _RESTORING else node
    assert isinstance(token, fx.Node)
    return memories(token)


def _read_by(node: fx.Node) -> frozenset[int]:
    if node.target in _RESTORING:
        return frozenset()
    return frozenset().union(*map(_memory_of, node.all_input_nodes))


def _sizes(node: fx.Node) -> Iterator[tuple[int, int]]:
    """Yield a node's storages with their bytes; for several results only if none has a node."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and node.target is not FETCH:
        for memory in _memory_of(node):
            yield memory, val.untyped_storage().nbytes()
    elif isinstance(val, (tuple, list)) and not any(
        one.meta.get("val") is not None for one in node.users
    ):
        tensors = [one for one in pytree.tree_leaves(val) if isinstance(one, torch.Tensor)]
        for memory, one in zip(sorted(memories(node)), tensors, strict=False):
            yield memory, one.untyped_storage().nbytes()


def peak_of(nodes: Sequence[fx.Node], results: Iterable[fx.Node] = ()) -> int:
    """Return the position after the first node at which the most bytes are live.

    Storages of `results` do not count: gradients live from their creation on under any plan.
    """
    lifetimes = Lifetimes()
    lifetimes.run(nodes)
    stays = {memory for node in results for memory in memories(node)}
    live = _live([one for one in lifetimes.found() if one.memory not in stays])
    return max(1, live.index(max(live))) if nodes else 0


def most_at_once(temporaries: Sequence[Temporary]) -> int:
    """Return the most bytes that are needed at one time."""
    return max(_live(temporaries))


def _live(temporaries: Sequence[Temporary]) -> list[int]:
    """Return the bytes that are needed at each time, from 0 on."""
    changes = [0] * (1 + max((one.end for one in temporaries), default=0))
    for one in temporaries:
        changes[one.begin] += one.nbytes
        changes[one.end] -= one.nbytes
    return list(accumulate(changes))


# --- layouts ------------------------------------------------------------------------------------


_ORDERS: tuple[Callable[[Temporary], Any], ...] = (
    lambda one: (-one.nbytes, one.begin),
    lambda one: (-one.nbytes * (one.end - one.begin), one.begin),
    lambda one: (one.begin - one.end, -one.nbytes),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of each temporary in the buffer."""

    offsets: tuple[int, ...]
    """In the order of the temporaries."""
    nbytes: int
    """Bytes of the buffer."""
    bound: int
    """Lower bound of any layout: the most bytes that are needed at one time."""

    def assert_invariants(self, temporaries: Sequence[Temporary]) -> None:
        """Check that no two temporaries share a byte at any time."""
        placed = list(zip(temporaries, self.offsets, strict=True))
        for number, (one, at) in enumerate(placed):
            assert at >= 0
            assert at % ALIGNMENT_BYTES == 0
            assert at + one.nbytes <= self.nbytes
            for other, there in placed[:number]:
                apart = at + one.nbytes <= there or there + other.nbytes <= at
                assert apart or not _meet(one, other)


def laid_out(temporaries: Sequence[Temporary]) -> Layout:
    """Return the best layout of those that are tried."""
    tried = (_placed(temporaries, order) for order in _ORDERS)
    offsets, nbytes = min(tried, key=lambda found: found[1])
    return Layout(tuple(offsets), nbytes, most_at_once(temporaries))


def _placed(
    temporaries: Sequence[Temporary], order: Callable[[Temporary], Any]
) -> tuple[list[int], int]:
    """Return offsets, and the bytes of the buffer."""
    offsets, top = [0] * len(temporaries), 0
    placed: list[int] = []
    for number in sorted(range(len(temporaries)), key=lambda n: order(temporaries[n])):
        one, at = temporaries[number], 0
        beside = (n for n in placed if _meet(one, temporaries[n]))
        for begin, end in sorted((offsets[n], offsets[n] + temporaries[n].nbytes) for n in beside):
            if begin >= at + one.nbytes:
                break
            at = max(at, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        offsets[number], top = at, max(top, at + one.nbytes)
        placed.append(number)
    return offsets, top


def _meet(one: Temporary, other: Temporary) -> bool:
    return one.begin < other.end and other.begin < one.end
