"""The saved-tensor hooks: what autograd calls when it saves a tensor and when it wants it back.

What stays true: what unpack returns has the bits, shape, strides and dtype of what was packed, or
an exception is raised. A tensor that is not offloaded stays, and gets the version check that
PyTorch leaves out for hooked tensors.

An Offload may be entered in several threads at once and inside itself: every `with` block is a
step of its own, and PyTorch applies the innermost pair of hooks of the thread.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from storm_client import ranges
from storm_client.errors import DaemonLost
from storm_client.policy import Policy
from storm_client.prefetch import OrderHistory
from storm_client.records import Handle, View
from storm_client.staging import ALIGNMENT
from storm_client.stats import OffloadStats, StatsRecorder
from storm_client.steps import Step
from storm_client.versions import KeptTensor, SavedVersion

if TYPE_CHECKING:
    from types import TracebackType

    from storm_client.session import Session
    from storm_client.sessions import Sessions
    from storm_client.supply import Supply

__all__ = ["Offload"]

SETTLE_SECONDS = 1.0
"""How long stats() waits for the daemon to have encoded what was stored last."""

Packed = Handle | KeptTensor


class Offload:
    """Offloads what autograd saves inside its `with` blocks; made by Client.offload."""

    def __init__(self, supply: Supply, policy: Policy, codec: str) -> None:
        """Use the sessions of a client, whose life is not this object's business."""
        self._supply = supply
        self._policy = policy
        self._codec = codec
        self._recorder = StatsRecorder()
        self._history = OrderHistory()
        self._entered = threading.local()  # a list of the hooks that this thread has entered

    def __enter__(self) -> Offload:
        """Begin a step in this thread.

        Raises:
            UsageError, DaemonLost: the client is closed, forked or without its daemon.
        """
        sessions = self._supply.current()
        sessions.sweep()
        self._policy.refresh()
        step = _StepHooks(
            sessions,
            self._policy,
            self._codec,
            self._recorder,
            self._history,
            keeps=self._supply.keeps,
        )
        hooks = saved_tensors_hooks(step.pack, step.unpack)
        hooks.__enter__()
        self._stack().append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the step; what it saved lives as long as the graph that needs it."""
        self._stack().pop().__exit__(kind, error, traceback)

    def stats(self) -> OffloadStats:
        """Return what was done so far, waiting up to a second for stores under way to end."""
        self._supply.sessions.settle(SETTLE_SECONDS)
        return self._recorder.snapshot()

    def _stack(self) -> list[Any]:
        stack: list[Any] | None = getattr(self._entered, "stack", None)
        if stack is None:
            stack = self._entered.stack = []
        return stack


class _StepHooks:
    """Pack and unpack of one step. The graph keeps it alive for as long as it has handles."""

    def __init__(
        self,
        sessions: Sessions,
        policy: Policy,
        codec: str,
        recorder: StatsRecorder,
        history: OrderHistory,
        *,
        keeps: bool,
    ) -> None:
        self._sessions = sessions
        self._keeps = keeps
        self._policy = policy
        self._codec = codec
        self._recorder = recorder
        self._step = Step(history)

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return what autograd is to hold instead of `tensor`."""
        reason = self._policy.reason(tensor)
        if reason is not None:
            return self._skip(tensor, reason)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._skip(tensor, "capture")  # already opening a session would spoil the graph
        try:
            session = self._sessions.of(tensor.device)
            return (
                self._skip(tensor, "device") if session is None else self._offload(tensor, session)
            )
        except DaemonLost:
            if not self._keeps:
                raise
            return self._keep(tensor)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor that was packed.

        Raises:
            RuntimeError: it was changed in place since.
            CorruptBlob, ActivationLost, DaemonLost: its bytes cannot be had again.
        """
        packed.version.check()
        if isinstance(packed, KeptTensor):
            return packed.tensor
        self._step.unpacked(packed)
        record = packed.record
        began = perf_counter()
        with ranges.span("unpack", record.nbytes, record.key):
            located = record.session.load(packed)
        if not located.is_original:
            self._recorder.restored(perf_counter() - began)
        return packed.version.alias(packed.view.rebuild(located))

    def _skip(self, tensor: torch.Tensor, reason: str) -> KeptTensor:
        self._recorder.skipped(_nbytes(tensor), reason)
        return KeptTensor.of(tensor)

    def _keep(self, tensor: torch.Tensor) -> KeptTensor:
        """Leave to memory what was meant for a daemon that is lost."""
        self._recorder.saved(tensor.nbytes, 0.0)
        self._recorder.kept(tensor.nbytes, "daemon_lost")
        return KeptTensor.of(tensor)

    def _offload(self, tensor: torch.Tensor, session: Session) -> Packed:
        storage = tensor.untyped_storage()
        view = View.of(tensor)
        touched = view.span()
        span = _worth_storing(touched, storage.nbytes())
        if span[1] - span[0] < self._policy.min_bytes:
            return self._skip(tensor, "small")
        version = SavedVersion.of(tensor)
        record = session.find(storage, touched, version.expected)
        if record is not None:
            self._recorder.deduplicated(tensor.nbytes)
        else:
            began = perf_counter()
            with ranges.span("pack", span[1] - span[0]):
                record = session.store(
                    storage,
                    span,
                    version,
                    self._codec,
                    self._recorder,
                    steady=_is_result(tensor),
                    soon=self._step.needed_at_once(span[1] - span[0]),
                )
            self._recorder.saved(tensor.nbytes, perf_counter() - began)
        return self._step.handle(record, view, version)


def _worth_storing(span: tuple[int, int], nbytes: int) -> tuple[int, int]:
    """Return the whole storage, or the span alone where it is less than half of that.

    The whole serves other views of the storage that are saved later.
    """
    if 2 * (span[1] - span[0]) >= nbytes:
        return 0, nbytes
    begin = span[0] - span[0] % ALIGNMENT
    return begin, min(nbytes, -(-span[1] // ALIGNMENT) * ALIGNMENT)


def _is_result(tensor: torch.Tensor) -> bool:
    """Tell whether an operation made the tensor's memory; a leaf's may be a resized parameter's."""
    base = tensor._base if tensor._is_view() else tensor
    return base is not None and base.grad_fn is not None


def _nbytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes as far as they are known: 0 for sparse and nested ones."""
    return tensor.nbytes if tensor.layout is torch.strided and not tensor.is_nested else 0
