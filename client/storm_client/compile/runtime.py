"""What the operators do when a compiled graph runs: values leave, are fetched, and come back.

A graph that is called with a Target hands its values to that client's daemon. What the daemon does
not take, or must not have, is held here, and given back as it is. Autograd's token is all that
keeps a value; its death, in whatever thread, is noticed where a graph runs next.

Where a budget is one of bytes, what a call may keep depends on what others keep meanwhile
(`shared_budget.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from storm_client.compile.shared_budget import Room, room_for
from storm_client.compile.tokens import TOKENS, Held, Lent, Stored, Unversioned, version_of
from storm_client.connect import shared_supply
from storm_client.devices import is_capturing
from storm_client.errors import ActivationLost, DaemonLost, lost_in_forward
from storm_client.monitoring.compiled_models import HANDLED
from storm_client.monitoring.stats import StatsRecorder
from storm_client.planner.decisions import Keep
from storm_client.policy import Policy
from storm_client.saved.ranges import Handle, StoredRange
from storm_client.saved.snapshots import Unchanging
from storm_client.saved.versions import SavedVersion, View
from stormd.protocol import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from storm_client.compile.schedule import Schedule
    from storm_client.planner.plan import Plan
    from storm_client.saved.ranges import Holder
    from storm_client.transport.session import Session
    from storm_client.transport.sessions import Sessions
    from storm_client.transport.supply import Supply

__all__ = ["Graph", "Target", "fetch", "hold", "running", "shared_target", "store", "wait"]

ALIGNMENT_BYTES = 16
"""Generated code reads what an operator returns as if it began at a multiple of this."""

SETTLE_SECONDS = 1.0
"""How long statistics wait for the daemon to have encoded what was stored last."""

FEW_RECORDS = 64
"""Of what was announced: among so many those that died are not worth a look."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One pair of graphs, as far as its runs have to know it."""

    plan: Plan
    schedule: Schedule
    ranks: dict[int, int]
    """Of the values that may be kept by choice in a run: their places in the schedule's order."""
    early: tuple[int, ...] = ()
    """Offloaded values whose fetches would be in time only if they began before the backward graph,
    in the order of use."""
    order: tuple[int, ...] = ()
    """All offloaded values, in the order in which the backward graph waits for them."""
    early_bytes: int = 0
    """Of the values whose fetches are early."""
    last_fetched: int | None = None
    """The value whose fetch begins last."""
    room: int = 0
    """Bytes below the backward graph's peak that are free from then on."""
    rooms: Mapping[int, int] = field(default_factory=dict)
    """The same from when it waits for each offloaded value on."""
    planned: int | None = None
    """Bytes that a run may keep of a budget of bytes that others share; None if nobody does."""

    @property
    def last(self) -> int | None:
        """The offloaded value that the backward graph waits for last."""
        return self.order[-1] if self.order else None


class Target:
    """Where the values of compiled graphs go: the daemon of one client. Threads may share it."""

    def __init__(
        self,
        supply: Callable[[], Supply],
        budget: Budget,
        codec: str,
        min_bytes: int,
        room: Room | None = None,
    ) -> None:
        """Use the sessions of `supply()`, which is called when the first value leaves.

        What runs keep by choice is taken of `room`, by default of one of its own.
        """
        self.budget = budget
        self.room = Room(budget) if room is None else room
        """What runs may keep by choice, where they decide that."""
        self.codec = codec
        self.min_bytes = min_bytes
        self.recorder = StatsRecorder()
        self.graphs: list[Graph] = []
        """Those compiled so far."""
        self.room.share(self)
        self.policy = Policy((), min_bytes)
        self._supply = supply
        self._lock = threading.Lock()  # protects all below
        self._is_used = False
        self._announced: dict[int, tuple[weakref.ref[Session], _Announced]] = {}
        """By the session's id. A WeakKeyDictionary would lose an interrupt in its callback."""

    def __deepcopy__(self, memo: dict[int, object]) -> Target:
        """Return itself: copies of a compiled model use the same client."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what was asked for; elsewhere it is for the client that the process shares."""
        return shared_target, (self.budget, self.codec, self.min_bytes)

    @property
    def supply(self) -> Supply:
        """Where sessions come from.

        Raises:
            StormError: there is no client yet, and none can be had.
        """
        return self._supply()

    @property
    def least(self) -> int:
        """Bytes that one of the backward graphs needs at the most, with nothing kept by choice."""
        return max((graph.schedule.least for graph in self.graphs), default=0)

    @property
    def planned(self) -> int | None:
        """Bytes that a run may keep by its plan, the most of any; None where none is compiled."""
        return max((graph.planned or 0 for graph in self.graphs), default=None)

    def settle(self) -> None:
        """Wait up to a second for stores in flight to end."""
        if self._is_used:
            self.supply.sessions.settle(SETTLE_SECONDS)

    def keep(self, value: torch.Tensor) -> Held:
        """Hold a value by choice."""
        self.recorder.skipped(value.nbytes, "budget")
        held = Held(value, self)
        self.room.keep(held, value.nbytes)
        return held

    def announced(self, session: Session) -> _Announced:
        """Return what graphs have announced of what a session holds."""
        with self._lock:
            known = self._announced.get(id(session))
            if known is None or known[0]() is not session:
                known = self._announced[id(session)] = (weakref.ref(session), _Announced())
            return known[1]

    def goes_forward(self) -> None:
        """Note that a value is saved."""
        self.is_going_back, self._is_used = False, True

    def goes_back(self) -> bool:
        """Note that a value is waited for; tell whether it is the first since one was saved."""
        is_first, self.is_going_back = not self.is_going_back, True
        self.room.goes_back()
        return is_first

    is_going_back = False
    """Whether a value was waited for since one was saved, in any thread: a hint."""


def shared_target(budget: Budget, codec: str, min_bytes: int) -> Target:
    """Return the target of the client that the process shares for what was asked for."""
    key = (budget, codec, min_bytes)
    found = _SHARED.get(key)
    if found is None:
        found = _SHARED.setdefault(key, Target(shared_supply, *key, room_for(None, budget)))
    return found


_SHARED: dict[tuple[Budget, str, int], Target] = {}


class Call:
    """One run of a compiled pair's forward graph, in its thread."""

    __slots__ = ("_count", "_ranks", "_room", "_sessions", "target", "trail")

    def __init__(self, target: Target, graph: Graph | None) -> None:
        """Begin one; an inference graph has no plan, and saves nothing."""
        self.target = target
        self._sessions: Sessions | None = None
        self._ranks = {} if graph is None else graph.ranks
        self.trail = None if graph is None else Trail(graph, _RUNNING.trail)
        self._room = target.room.left(graph.planned) if graph is not None and self._ranks else 0
        self._count = 0 if graph is None else graph.schedule.holding(self._room)

    def keeps(self, number: int, nbytes: int) -> bool:
        """Tell whether a value is kept by choice, and count it.

        Shapes that vary may make it larger than was planned.
        """
        if self._ranks.get(number, self._count) >= self._count or nbytes > self._room:
            return False
        self._room -= nbytes
        return True

    def sessions(self) -> Sessions:
        """Return the sessions for what this run saves.

        Raises:
            UsageError: the client is closed, or this is a forked child.
            DaemonLost: the daemon is gone, and the client was not told to go on without.
        """
        if self._sessions is None:
            self._sessions = self.target.supply.current()
            self._sessions.sweep()
            self.target.goes_forward()
        return self._sessions


class Trail:
    """What a run stored, in the order in which its backward pass needs it.

    Where what is fetched takes room that is there anyway, in a staging area, all is announced when
    the first is fetched: then one message asks for as much as there is room for. Else each is when
    its graph says so; but what a backward pass needs as soon as it begins is fetched before.
    Backward passes mostly run in the reverse order of the forward passes, so when one has begun its
    last restore, what the run before stored is next: at once if that fits below the peak, else when
    it does, or when all of this one is back. Where it is not next, that was fetched for nothing.
    What is stored holds its run's trail, and nothing else does.
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
        _RUNNING.trail = weakref.ref(self)

    def announce(self, session: Holder) -> None:
        """Announce all that the run has in a session, unless that was done."""
        if not self._is_announced:
            self._is_announced = True
            for number in self._graph.order:
                stored = self._living(number)
                if stored is not None and stored.holder is session:
                    stored.announce()

    def has_begun(self, number: int) -> None:
        """Note that the restore of a value has begun; behind the last the run before follows."""
        if number == self._graph.last_fetched:
            self._has_begun = True
            self._go_on(self._graph.room)

    def has_brought(self, number: int) -> None:
        """Note that a value is back; behind the last the run before follows in any case."""
        if self._has_begun:
            self._go_on(None if number == self._graph.last else self._graph.rooms[number])

    def _go_on(self, room: int | None) -> None:
        """Begin with what the run before stored, if there is room for it."""
        before = None if self._before is None else self._before()
        if before is not None and (room is None or before._graph.early_bytes <= room):
            self._has_begun = False
            before._fetch_early()

    def _fetch_early(self) -> None:
        for number in self._graph.early:
            stored = self._living(number)
            if stored is not None:
                stored.fetch()

    def _living(self, number: int) -> Stored | None:
        reference = self._stored.get(number)
        return None if reference is None else reference()


class _Announced:
    """What fetches have announced of one session and nobody has waited for, in this order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below
        self._records: dict[int, weakref.ref[StoredRange]] = {}
        self._seen: set[int] = set()
        self._limit = FEW_RECORDS

    def add(self, record: StoredRange) -> None:
        """Expect that `record` is waited for after all that was announced before."""
        with self._lock:
            if record.key not in self._records:
                self._records[record.key] = weakref.ref(record)

    def remove(self, record: StoredRange) -> None:
        """Note that `record` is there; forget what died, whenever there is twice as much."""
        with self._lock:
            self._records.pop(record.key, None)
            self._seen.discard(record.key)
            if len(self._records) > self._limit:
                gone = [key for key, reference in self._records.items() if reference() is None]
                for key in gone:
                    del self._records[key]
                self._seen.difference_update(gone)
                self._limit = 2 * len(self._records) + FEW_RECORDS

    @property
    def is_due(self) -> bool:
        """Return True: what is announced comes a few times a step."""
        return True

    def upcoming(self) -> list[StoredRange]:
        """Return the living records, the nearest first."""
        with self._lock:
            found = [reference() for reference in self._records.values()]
        return [record for record in found if record is not None]

    def unseen(self) -> list[StoredRange | None]:
        """Return those that have not been looked at, None for a dead one."""
        with self._lock:
            return [self._records[key]() for key in self._unseen()]

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are here or have been requested."""
        with self._lock:
            self._seen.update(list(islice(self._unseen(), count)))

    def _unseen(self) -> Iterator[int]:
        return (key for key in self._records if key not in self._seen)


class _Running(threading.local):
    call: Call | None = None
    trail: weakref.ref[Trail] | None = None
    """Of the run that has stored something last."""


_RUNNING = _Running()


@contextmanager
def running(target: Target, graph: Graph | None) -> Iterator[None]:
    """Run a compiled graph inside: what it stores goes to `target`, and hooks leave it alone."""
    call = Call(target, graph)
    outer, _RUNNING.call = _RUNNING.call, call
    HANDLED.depth += 1
    try:
        yield
    finally:
        HANDLED.depth -= 1
        _RUNNING.call = outer


# --- the operators ------------------------------------------------------------------------------


def store(value: torch.Tensor, number: int, *, lent: bool) -> torch.Tensor:
    """Take a value, the graph's value `number`, and return the token that stands for it.

    One that is `lent`, an input or an output of the graph, leaves when nobody else holds it.

    Raises:
        DaemonLost: the daemon is gone, and the client was not told to go on without.
    """
    call = _RUNNING.call
    assert call is not None, "a graph of the stormd backend was run without it"
    if value.is_inference():
        call.target.recorder.skipped(value.nbytes, "inference")
        return TOKENS.make(Unversioned(value))
    return TOKENS.make(_pack(call, value, number, lent=lent))


def hold(value: torch.Tensor) -> torch.Tensor:
    """Return a token for a parameter as it is: it may be given other data before it is used."""
    return TOKENS.make(Unversioned(value) if value.is_inference() else Lent(value))


def fetch(token: torch.Tensor) -> None:
    """Begin to bring a value back."""
    content = TOKENS.content(token)
    if isinstance(content, Stored):
        content.fetch()


def wait(token: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return a value, in its bits; nobody may write to it.

    Raises:
        RuntimeError: it was changed in place since it was stored.
        CorruptBlob, ActivationLost, DaemonLost: its bytes cannot be had again.
    """
    tensor = TOKENS.content(token).bring()
    if tensor.size() != size:
        raise ActivationLost(f"a value of shape {tuple(tensor.size())} came back for {size}")
    if tensor.stride() == stride and not tensor.data_ptr() % ALIGNMENT_BYTES:
        return tensor
    laid_out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return laid_out.copy_(tensor)


def _pack(call: Call, value: torch.Tensor, number: int, *, lent: bool) -> Held | Stored:
    target = call.target
    if call.keeps(number, value.nbytes):
        return target.keep(value)
    if value.is_cuda and is_capturing(value.device):
        return _skip(target, value, "capture")
    policy = target.policy
    decision = policy.decide(value) if lent else policy.decide_storage(value.untyped_storage())
    if isinstance(decision, Keep):
        return _skip(target, value, decision.reason)
    try:
        session = call.sessions().of(value.device)
        if session is None:
            return _skip(target, value, "device")
        handle = _handle(call, value, session, None if lent else number)
        return Stored(handle, target, number, call.trail)
    except DaemonLost as loss:
        if not target.supply.keeps:
            raise lost_in_forward(loss) from loss
        target.recorder.saved(value.nbytes, 0.0)
        target.recorder.kept(value.nbytes, "daemon_lost")
        return Held(value, target)


def _skip(target: Target, value: torch.Tensor, reason: str) -> Held:
    target.recorder.skipped(value.nbytes, reason)
    return Held(value, target)


def _handle(call: Call, value: torch.Tensor, session: Session, number: int | None) -> Handle:
    """Have a value leave at once, or where it has no number when nobody else holds it."""
    target, storage = call.target, value.untyped_storage()
    record = session.find(storage, value)
    if record is not None:
        target.recorder.deduplicated(value.nbytes)
    else:
        began = perf_counter()
        record = session.hold(storage, value.dtype, target.codec, target.recorder)
        if number is not None:
            record.proof = Unchanging(value)
            session.send(record)
        target.recorder.saved(value.nbytes, perf_counter() - began)
    version = version_of(value, SavedVersion.of, storage._cdata)
    handle = Handle(record, View.of(value), version, target.announced(session), 0)
    session.saved.add_use(handle)
    return handle
