"""The operators when a compiled graph runs: they offload, prefetch and restore values.

A graph that is called with a Target offloads its values to that client's daemon. Values that the
daemon does not take, or must not have, are kept with the client and returned as they are. Only
autograd's token keeps a value alive. When a token is freed, in whatever thread, the graph that runs
next notices it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from storm_client.compile.stored import LATEST, Stored, Trail
from storm_client.compile.tokens import TOKENS, Held, SharedParameter, Unversioned, version_of
from storm_client.devices import is_capturing
from storm_client.errors import ActivationLost, DaemonLost, lost_in_forward
from storm_client.monitoring.compiled_models import HANDLED
from storm_client.planner.decisions import Keep
from storm_client.saved.ranges import Handle
from storm_client.saved.snapshots import Unchanging
from storm_client.saved.versions import SavedVersion, View

if TYPE_CHECKING:
    from storm_client.compile.graph import Graph
    from storm_client.compile.target import Target
    from storm_client.transport.session import Session
    from storm_client.transport.sessions import Sessions

__all__ = ["fetch", "hold", "running", "store", "wait"]

ALIGNMENT_BYTES = 16
"""Generated code assumes that the address of an operator's result is a multiple of this."""


class Call:
    """One run of a compiled pair's forward graph, in its thread."""

    __slots__ = ("_budget_left", "_count", "_ranks", "_sessions", "target", "trail")

    def __init__(self, target: Target, graph: Graph) -> None:
        """Begin a run that saves by the plan of `graph`."""
        self.target = target
        self.trail = Trail(graph, LATEST.trail)
        self._sessions: Sessions | None = None
        self._ranks = graph.ranks
        self._budget_left = target.shared_budget.left(graph.planned) if graph.ranks else 0
        self._count = graph.schedule.holding(self._budget_left)

    def keeps(self, number: int, nbytes: int) -> bool:
        """Return whether a value is kept by choice, and count it.

        Dynamic shapes may make it larger than was planned.
        """
        if self._ranks.get(number, self._count) >= self._count or nbytes > self._budget_left:
            return False
        self._budget_left -= nbytes
        return True

    def sessions(self) -> Sessions:
        """Return the sessions for the values that this run saves.

        Raises:
            UsageError: the client is closed, or this is a forked child.
            DaemonLost: the daemon is lost, and the client was not told to continue without it.
        """
        if self._sessions is None:
            self._sessions = self.target.supply.current()
            self._sessions.sweep()
            self.target.record_save()
        return self._sessions


class _Running(threading.local):
    call: Call | None = None


_RUNNING = _Running()


@contextmanager
def running(target: Target, graph: Graph | None) -> Iterator[None]:
    """Run a compiled graph in the block: it stores to `target`, and hooks ignore what it saves.

    An inference graph has no plan, so `graph` is None, and stores nothing.
    """
    call = None if graph is None else Call(target, graph)
    outer, _RUNNING.call = _RUNNING.call, call
    HANDLED.depth += 1
    try:
        yield
    finally:
        HANDLED.depth -= 1
        _RUNNING.call = outer


# --- the operators ------------------------------------------------------------------------------


def store(value: torch.Tensor, number: int, *, shared: bool) -> torch.Tensor:
    """Offload or keep a value, the graph's `number`, and return the token that stands for it.

    A `shared` value, an input or an output of the graph, is offloaded when nobody else holds it.

    Raises:
        DaemonLost: the daemon is lost, and the client was not told to continue without it.
    """
    call = _RUNNING.call
    assert call is not None, "a graph of the stormd backend was run without it"
    if value.is_inference():
        call.target.recorder.skipped(value.nbytes, "inference")
        return TOKENS.make(Unversioned(value))
    return TOKENS.make(_pack(call, value, number, shared=shared))


def hold(value: torch.Tensor) -> torch.Tensor:
    """Return a token for a parameter as it is: it may get other data before it is used."""
    return TOKENS.make(Unversioned(value) if value.is_inference() else SharedParameter(value))


def fetch(token: torch.Tensor) -> None:
    """Begin to restore a value."""
    content = TOKENS.content(token)
    if isinstance(content, Stored):
        content.fetch()


def wait(token: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return a value with its original bits; nobody may write to it.

    Raises:
        RuntimeError: the value was modified in place since it was stored.
        CorruptBlob, ActivationLost, DaemonLost: its bytes cannot be restored.
    """
    tensor = TOKENS.content(token).restore()
    if tensor.size() != size:
        raise ActivationLost(f"a value of shape {tuple(tensor.size())} came back for {size}")
    if tensor.stride() == stride and not tensor.data_ptr() % ALIGNMENT_BYTES:
        return tensor
    laid_out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    if laid_out.untyped_storage().nbytes() < tensor.nbytes:
        raise ActivationLost(f"a value of shape {tuple(size)} was read with the strides {stride}")
    return laid_out.copy_(tensor)


def _pack(call: Call, value: torch.Tensor, number: int, *, shared: bool) -> Held | Stored:
    target = call.target
    if call.keeps(number, value.nbytes):
        held = _skip(target, value, "budget")
        target.shared_budget.keep(held)
        return held
    if value.is_cuda and is_capturing(value.device):
        return _skip(target, value, "capture")
    policy = target.policy
    decision = policy.decide(value) if shared else policy.decide_storage(value.untyped_storage())
    if isinstance(decision, Keep):
        return _skip(target, value, decision.reason)
    try:
        session = call.sessions().of(value.device)
        if session is None:
            return _skip(target, value, "device")
        handle = _handle(call, value, session, None if shared else number)
        return Stored(handle, target, number, call.trail)
    except DaemonLost as loss:
        if not target.supply.keeps_without_daemon:
            raise lost_in_forward(loss) from loss
        target.recorder.saved(value.nbytes, 0.0)
        target.recorder.kept(value.nbytes, "daemon_lost")
        return Held(value, target)


def _skip(target: Target, value: torch.Tensor, reason: str) -> Held:
    target.recorder.skipped(value.nbytes, reason)
    return Held(value, target)


def _handle(call: Call, value: torch.Tensor, session: Session, number: int | None) -> Handle:
    """Offload a value: at once, or if it has no number, when nobody else holds it."""
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
