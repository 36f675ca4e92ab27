"""Returns saved tensors in the backward pass: each as it was, or an exception is raised.

Unpack returns the tensor that PyTorch itself would return at that moment: with its bits, shape,
strides and dtype. Kept tensors get the version check that PyTorch omits for hooked tensors.
"""

from __future__ import annotations

import threading
from functools import cached_property
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, NamedTuple

import torch

from storm_client.eager.bits import compare, same_bits
from storm_client.eager.proofs import Trial
from storm_client.eager.recompute import Replayed, Result
from storm_client.eager.sources import (
    HeldInputs,
    OtherNumbers,
    check_input,
    is_own_backward,
)
from storm_client.errors import DaemonLost, StormError, lost_in_backward
from storm_client.hook_stack import untraced
from storm_client.monitoring import profiler_ranges as ranges
from storm_client.planner import Step
from storm_client.saved.distributed import Distributed
from storm_client.saved.ranges import Handle, Located, Use
from storm_client.saved.versions import KeptTensor, SavedVersion

if TYPE_CHECKING:
    from collections.abc import Callable

    from storm_client.eager.marks import Mark
    from storm_client.eager.planned_step import PlannedStep
    from storm_client.eager.signature import StepSignature
    from storm_client.monitoring.stats import StatsRecorder
    from storm_client.monitoring.trace import StepTrace, Untraced
    from storm_client.native import _follow
    from storm_client.policy import Policy

__all__ = ["Packed", "Tried", "Unpacking"]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Tried(NamedTuple):
    """Autograd's object for a tensor that compiled code recomputes and that is offloaded, too.

    The step does both because they have not been compared at this size yet.
    """

    trial: Trial
    recomputed: _follow.Recomputed
    recompute: Callable[[_follow.Recomputed], torch.Tensor | None]

    @property
    def version(self) -> SavedVersion:
        """The tensor's version."""
        packed: Handle = self.trial.packed
        return packed.version


_Plain = Handle | KeptTensor | Replayed | Tried
Packed = _Plain | Distributed


class Unpacking:
    """The unpack hook of one step. The graph keeps it alive while it has handles."""

    def __init__(
        self, policy: Policy, recorder: StatsRecorder, *, keeps_without_daemon: bool
    ) -> None:
        """Count in `recorder`.

        `keeps_without_daemon` says whether later steps continue without a lost daemon.
        """
        self.forward_end: tuple[StepSignature, Mark] | None = None
        """The signature that the forward pass has followed, and when the pass had sent all its
        tensors. None where no turn has to be timed, and once the backward pass has asked."""
        self._policy = policy
        self._recorder = recorder
        self._keeps_without_daemon = keeps_without_daemon
        self.inputs = HeldInputs()
        """What recipes made in Python read."""
        self._written: dict[int, torch.UntypedStorage] = {}
        """By address: memory that a custom function's backward may have written to, for the next
        backward pass over the same graph."""
        self._replaying = threading.RLock()  # protects all results of the step, and the following
        self._restore_seconds = 0.0
        """Seconds spent on restoring inputs of recomputation, which count as waiting."""

    def begin(self, planned: PlannedStep, trace: StepTrace | Untraced) -> None:
        """Note the step's plan and trace, before the step saves anything."""
        self._planned = planned
        self._trace = trace
        self._notes_costs = planned.script is not None
        """Whether compiled code follows the step: a step that learns takes longer."""

    @untraced
    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor that was packed.

        Raises:
            RuntimeError: it was modified in place after it was saved.
            CorruptBlob, ActivationLost, DaemonLost: its bytes cannot be restored.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # PyTorch will set the returned tensor's version
                return self.unpack(packed)
        if isinstance(packed, Distributed):
            return packed.unpack()
        tensor = self._unpacked(packed)
        if packed.version.storage and not is_own_backward():
            self._hand_out(packed, tensor)
        return tensor

    def _unpacked(self, packed: _Plain) -> torch.Tensor:
        if isinstance(packed, Handle):
            return self._load(packed)
        replaced = self._note_request(packed.version)
        if replaced is not None:
            return replaced
        if isinstance(packed, Replayed):
            return self._replay(packed)
        if isinstance(packed, Tried):
            return self._run_trial(packed.trial, lambda: packed.recompute(packed.recomputed))
        self._trace.used(id(packed))
        return self._kept(packed)

    def _hand_out(self, packed: _Plain, tensor: torch.Tensor) -> None:
        """Prepare for uncounted writes to a tensor, by a custom function's backward or a script."""
        storage = tensor.untyped_storage()
        self.protect_inputs(packed.version.storage)
        self.protect_inputs(storage._cdata)
        if isinstance(packed, Replayed):
            with self._replaying:
                packed.result.protect(tensor)
        if _keeps_graph() and torch._C._current_autograd_node() is not None:
            self._written[storage._cdata] = storage

    def protect_inputs(self, storage: int) -> None:
        """Copy what recipes read of a storage, before somebody gets it who may write to it."""
        with self._replaying:
            self.inputs.protect(storage)

    def _kept(self, kept: KeptTensor) -> torch.Tensor:
        """Return a tensor that was kept, from memory or from the daemon if it was moved."""
        token = kept.token  # read before `moved`: another thread may be moving the tensor
        return token if kept.moved is None else self._restored(kept.moved)

    @cached_property
    def _may_hand_out(self) -> bool:
        """Whether memory may be used before the daemon has confirmed its restore."""
        return not self._policy.acts_on_gradients_early()

    def _note_request(self, version: SavedVersion) -> torch.Tensor | None:
        """Note that a tensor saved at `version` is needed; return its replacement, if it has one.

        Raises:
            RuntimeError: it was modified in place after it was saved.
        """
        self.note_unpack()
        version.check()
        return version.replaced()

    def note_unpack(self) -> None:
        """Note that the backward pass asks for a tensor."""
        end, self.forward_end = self.forward_end, None
        if end is not None:
            signature, moment = end
            signature.times.record_turn(moment.until_now())

    def _load(self, handle: Handle) -> torch.Tensor:
        """Return a saved tensor, or the tensor with other data that has replaced it.

        Raises:
            RuntimeError, CorruptBlob, ActivationLost, DaemonLost: as `unpack`.
        """
        replaced = self._note_request(handle.version)
        return self._restored(handle) if replaced is None else replaced

    def _restored(self, handle: Handle) -> torch.Tensor:
        """Return a tensor as it was saved, whatever its version is now."""
        return handle.version.alias(handle.view.rebuild(self.load_bytes(handle)))

    @untraced
    def load_bytes(self, use: Use) -> torch.UntypedStorage:
        """Return the bytes of a saved tensor, in memory that streams may use in stream order.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost: as `unpack`.
        """
        assert isinstance(use.step, Step)  # this step, or the step of a moved tensor
        is_first = use.step.unpacked(use)
        record = use.record
        began, worked = perf_counter(), thread_time()
        try:
            if ranges.is_profiling():
                with ranges.span("unpack", record.nbytes, record.key):
                    located = self._located(use, is_first=is_first)
            else:
                located = self._located(use, is_first=is_first)
        except DaemonLost as loss:
            raise lost_in_backward(loss, keeps=self._keeps_without_daemon) from loss
        self._trace.used(id(record))
        if not located.is_original:
            self._recorder.restored(self._trace.paused("wait", began))
            if self._notes_costs and record.session.has_in_place:
                self._planned.costs.restored(thread_time() - worked)
        return located.storage

    def _located(self, use: Use, *, is_first: bool) -> Located:
        session = use.record.session
        may_hand_out = session.has_in_place and self._may_hand_out
        return session.load(use, is_first=is_first, may_hand_out=may_hand_out)

    def restore_input(self, packed: Handle | KeptTensor) -> torch.Tensor:
        """Return an input of recomputation as it was when it was saved.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost: it was modified in place since, or its bytes
                cannot be restored.
        """
        check_input(packed.version)
        return self._as_saved(packed)

    def _as_saved(self, packed: Handle | KeptTensor) -> torch.Tensor:
        """Return a tensor as it was saved; restoring it counts as waiting, not as recomputing."""
        if isinstance(packed, KeptTensor):
            return self._kept(packed)
        began = perf_counter()
        tensor = self._restored(packed)
        self._restore_seconds += perf_counter() - began
        return tensor

    def _replay(self, replayed: Replayed) -> torch.Tensor:
        """Return a recomputed tensor, or, while its recipe is on trial, the saved tensor itself."""
        with self._replaying:
            if replayed.trial is not None:
                tensor = self._run_trial(replayed.trial, lambda: self._recomputed(replayed.result))
                is_handle = isinstance(replayed.trial.packed, Handle)
                return tensor if is_handle else replayed.version.alias(tensor)
            began, restore_seconds = perf_counter(), self._restore_seconds
            with ranges.span("replay", replayed.result.nbytes):
                tensor = replayed.result.unpacked(replayed.view, replayed.version)
            waited = self._restore_seconds - restore_seconds
        if replayed.checksum is not None and not replayed.result.is_own_memory(tensor):
            compare(replayed.checksum, tensor.untyped_storage())
        self._trace.used(id(replayed.result))
        self._recorder.replayed(self._trace.paused("replay", began) - waited)
        return tensor

    def _run_trial(
        self, trial: Trial, recompute: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the offloaded tensor, and note whether recomputation gives the same bits."""
        trial.packed.version.check()
        tensor = self._as_saved(trial.packed)
        try:
            made = recompute()
            if made is None:
                pass  # its operation ran while another step signature was expected
            elif same_bits(made.untyped_storage(), tensor.untyped_storage()):
                self._planned.prove(trial)
            else:
                trial.fail("recomputed, it had other bits")
        except (DaemonLost, OtherNumbers):
            raise
        except (RuntimeError, StormError) as error:
            trial.fail(f"could not be recomputed: {error}")
        return tensor

    def _recomputed(self, result: Result) -> torch.Tensor | None:
        """Return the recomputed tensor; None if the step departed before a recipe was made."""
        return None if self._planned.has_diverged and not result.has_recipe else result.tried()
