"""Values that compiled graphs have stored, and the order in which a backward pass fetches them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from storm_client.errors import DaemonLost, lost_in_backward

if TYPE_CHECKING:
    import torch

    from storm_client.compile.graph import Graph
    from storm_client.compile.target import Target
    from storm_client.saved.ranges import Handle, Holder

__all__ = ["LATEST", "Stored", "Trail"]


class Stored:
    """A value that is offloaded, or in flight."""

    __slots__ = ("__weakref__", "_handle", "_number", "_target", "_trail")

    def __init__(self, handle: Handle, target: Target, number: int, trail: Trail) -> None:
        self._handle = handle
        self._target = target
        self._number = number
        self._trail = trail
        trail.note(number, self)

    def fetch(self) -> None:
        """Announce the value, and begin to fetch all announced values, in this order."""
        session = self.session
        if not session.has_in_place:
            self._trail.announce(session)
        self.announce()
        session.prefetch(self._target.announced(session))
        self._trail.has_begun(self._number)

    @property
    def session(self) -> Holder:
        """The session that has its bytes."""
        return self._handle.record.session

    def announce(self) -> None:
        """Expect that the value is waited for after all values announced before."""
        record = self._handle.record
        self._target.announced(record.session).add(record)

    def restore(self) -> torch.Tensor:
        """Return the value."""
        handle, target = self._handle, self._target
        handle.version.check()
        replaced = handle.version.replaced()
        if replaced is not None:
            return replaced
        began = perf_counter()
        record = handle.record
        try:
            located = record.session.load(handle, is_first=target.record_restore())
        except DaemonLost as loss:
            raise lost_in_backward(loss, keeps=target.supply.keeps_without_daemon) from loss
        target.announced(record.session).remove(record)
        if not located.is_original:
            target.recorder.restored(perf_counter() - began)
        self._trail.has_restored(self._number)
        return handle.view.rebuild(located.storage)


class Trail:
    """The values that a run stored, in the order in which its backward pass needs them.

    If fetched values go to a staging area, which takes no further memory, all are announced when
    the first is fetched. Then one message asks for as many as fit. Otherwise each is announced when
    its graph fetches it, but those that a backward pass needs as soon as it begins are fetched
    before.

    Backward passes mostly run in the reverse order of the forward passes. So when a run has begun
    its last restore, the early values of the run before are next. They are fetched at once if they
    fit below the peak, else when they do, or when all of this run's values are restored. If that
    run is not next, they were fetched for nothing. Only stored values hold their run's trail.
    """

    __slots__ = ("__weakref__", "_before", "_graph", "_has_begun", "_is_announced", "_stored")

    def __init__(self, graph: Graph, before: weakref.ref[Trail] | None) -> None:
        self._graph, self._before = graph, before
        self._stored: dict[int, weakref.ref[Stored]] = {}
        self._is_announced = False
        self._has_begun = False
        """Whether all its restores have begun, and the run before is still to follow."""

    def note(self, number: int, stored: Stored) -> None:
        """Note that the run stored its value `number`."""
        self._stored[number] = weakref.ref(stored)
        LATEST.trail = weakref.ref(self)

    def announce(self, session: Holder) -> None:
        """Announce all values of the run that a session has, unless that was done."""
        if not self._is_announced:
            self._is_announced = True
            for stored in self._living(self._graph.order):
                if stored.session is session:
                    stored.announce()

    def has_begun(self, number: int) -> None:
        """Note that a value's restore has begun; after the last, the run before follows."""
        if number == self._graph.last_fetched:
            self._has_begun = True
            self._go_on(self._graph.free_bytes)

    def has_restored(self, number: int) -> None:
        """Note that a value is restored; after the last, the run before follows in any case."""
        if self._has_begun:
            self._go_on(None if number == self._graph.last else self._graph.free_bytes_from[number])

    def _go_on(self, free_bytes: int | None) -> None:
        """Fetch the early values of the run before if `free_bytes` suffice; None for no limit."""
        before = None if self._before is None else self._before()
        if before is not None and (free_bytes is None or before._graph.early_bytes <= free_bytes):
            self._has_begun = False
            for stored in before._living(before._graph.early):
                stored.fetch()

    def _living(self, numbers: Iterable[int]) -> Iterator[Stored]:
        """Yield those of some values that the run stored and that may still be needed."""
        for number in numbers:
            reference = self._stored.get(number)
            stored = None if reference is None else reference()
            if stored is not None:
                yield stored


class _Latest(threading.local):
    trail: weakref.ref[Trail] | None = None


LATEST = _Latest()
"""The trail of the latest run that has stored something in this thread."""
