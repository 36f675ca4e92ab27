"""The saved-tensor hooks of one step: autograd calls them to save a tensor and to get it back.

This module decides about each tensor when it is saved; `unpacking` returns it later. A tensor that
is neither offloaded nor recomputed is kept.
"""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from storm_client.checkpointing import CheckpointedLayers
from storm_client.devices import is_capturing
from storm_client.eager.bits import checksum
from storm_client.eager.controller import Planning
from storm_client.eager.launches import watch_launches
from storm_client.eager.marks import Mark
from storm_client.eager.recompute import Replayed, Result
from storm_client.eager.values import SaveHooks
from storm_client.errors import DaemonLost, lost_in_forward
from storm_client.hook_stack import Hooks, Watcher, untraced
from storm_client.monitoring import profiler_ranges as ranges
from storm_client.monitoring.compiled_models import HANDLED, CompiledModels
from storm_client.monitoring.native_counts import NativeCounts
from storm_client.monitoring.stats import StatsRecorder
from storm_client.monitoring.trace import Traces
from storm_client.native import loader
from storm_client.planner import Decision, Keep, OrderHistory, Replay, Step
from storm_client.planner.decisions import NO_ACTIVATIONS
from storm_client.policy import Policy
from storm_client.results import Results
from storm_client.saved.distributed import Distributed, local_of, nbytes_of
from storm_client.saved.ranges import Handle, StoredRange
from storm_client.saved.snapshots import SnapshotProof, is_result
from storm_client.saved.versions import KeptTensor, SavedVersion, View
from storm_client.transport.kept_memory import note
from storm_client.unpacking import Packed, Tried, Unpacking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.overrides import TorchFunctionMode

    from storm_client.eager.events import RecordedValue
    from storm_client.eager.signature import StepSignature
    from storm_client.native import Native, _follow
    from storm_client.planner.problem import PlainLoss
    from storm_client.transport.session import Session
    from storm_client.transport.sessions import Sessions

__all__ = ["StepHooks"]


class StepHooks:
    """The pack and unpack hooks of one step. The graph keeps them alive while it has handles."""

    def __init__(
        self,
        sessions: Sessions,
        policy: Policy,
        codec: str,
        recorder: StatsRecorder,
        history: OrderHistory,
        *,
        planning: Planning,
        keeps_without_daemon: bool,
        traces: Traces,
        layers: CheckpointedLayers,
        tiles_losses: bool,
        compiled: CompiledModels | None,
    ) -> None:
        self.tiles_losses = tiles_losses
        """Whether losses are computed in tiles while these hooks are the innermost."""
        self._compiled = compiled
        """Counts the bytes that compiled graphs save, in the first steps."""
        self._layers = layers
        self._sessions = sessions
        self._keeps_without_daemon = keeps_without_daemon
        self._unpacking = Unpacking(policy, recorder, keeps_without_daemon=keeps_without_daemon)
        self._policy = policy
        self._codec = codec
        self._recorder = recorder
        self._step = Step(history)
        follow = loader.module()
        counts = self._native_counts(follow)
        self._min_bytes = planning.min_bytes(policy.min_bytes)
        """Smallest tensor, in bytes, that is not kept as small."""
        restore, inputs = self._unpacking.restore_input, self._unpacking.inputs
        hooks = SaveHooks(self._pack_input, restore, inputs, policy.is_at_rest)
        self._planned = planning.begin(self._min_bytes, hooks, counts=counts, follow=follow)
        self._results = Results(
            self._planned,
            self._step,
            policy,
            recorder,
            min_bytes=self._min_bytes,
            codec=codec,
            keeps_without_daemon=keeps_without_daemon,
        )
        self._session: Session | None = None
        """The session of the first tensor; it is used to tell the daemon of the plan."""
        self._follower = self._find_follower(follow, counts)
        """Compiled code that follows the step, until the block has ended."""
        self._launches = self._planned.launches
        """Notes the kernels that the block launches, until the block has ended."""
        if self._follower is not None and self._planned.has_launches:
            self._launches = watch_launches(follow, self._follower)
        self._trace = traces.begin(recorder, seldom=self._follower is not None)
        self._unpacking.begin(self._planned, self._trace)

    def note_loss(self, plain: PlainLoss) -> None:
        """Note what PyTorch's own loss would take beyond the loss in tiles."""
        self._planned.note_loss(plain)

    @property
    def mode(self) -> TorchFunctionMode | None:
        """The function mode that watches PyTorch's functions in the block, or None."""
        return self._planned.mode

    @property
    def watchers(self) -> Sequence[Watcher]:
        """The watchers of the operators that the block calls."""
        calls = self._planned.watcher if self._follower is None else self._follower
        launches = None if self._launches is None else self._launches.watcher
        return [one for one in (calls, launches) if one is not None]

    def _native_counts(self, follow: Native | None) -> NativeCounts | None:
        """Return the counts of compiled code if it may follow the step, else None."""
        if follow is None or self._compiled is not None:
            return None
        if self._policy.layers is not None or HANDLED.depth:
            return None
        if self._recorder.native is None:
            self._recorder.native = NativeCounts(follow.Tallies())
        return self._recorder.native

    def _find_follower(
        self, follow: Native, counts: NativeCounts | None
    ) -> _follow.Follower | None:
        """Return compiled hooks if they can follow all that the step is expected to do."""
        script = self._planned.script
        if counts is None or script is None:
            return None
        self._planned.costs.recompute = counts.tallies.seconds_an_operation()
        if self._planned.has_unsent_plan:  # no save of such a step may tell the daemon
            with suppress(DaemonLost):
                self._session = self._sessions.of(self._planned.device)
        hooks = (
            self._pack_unexpected,
            self._pack_expected,
            self._pack_trial,
            self._unpacking.unpack,
            self._results.offload_waiting,
            self._results.offload_unshared,
            self._unpacking.load_bytes,
            self._planned.pack_input,
            self._unpacking.restore_input,
            self._unpacking.protect_inputs,
            self._unpacking.note_unpack,
        )
        return follow.Follower(  # type: ignore[no-any-return]
            script,
            counts.tallies,
            self._policy.owned(follow),
            hooks,
            self._min_bytes,
            counts.row("", "skipped", "small"),
            counts.row("", "skipped", "parameter"),
        )

    def begin(self) -> None:
        """Note that the hooks are on PyTorch's stack."""
        self._layers.begin(self)
        if self._launches is not None:
            self._launches.begin()

    def end(self) -> None:
        """End the block: store the tensors that it saved and that may be offloaded now.

        Results are offloaded now even if somebody still holds them: their changes are counted.
        """
        self._layers.end(self)
        self._end_launches()
        self._send_plan()
        followed = self._end_plan()
        try:
            self._sessions.send_unshared()
            self._results.send()
            if followed is not None and followed.wants_turn:
                self._unpacking.forward_end = followed, Mark(followed.clock)
        except DaemonLost as loss:
            if not self._keeps_without_daemon:
                raise lost_in_forward(loss) from loss

    def _end_launches(self) -> None:
        launches, self._launches = self._launches, None
        if launches is not None:
            launches.end()

    def _end_plan(self) -> StepSignature | None:
        """Learn from the step; return the signature whose plan it has followed to its end."""
        follower, self._follower = self._follower, None
        if follower is not None:
            try:
                position = follower.end()
            except DaemonLost as loss:
                if not self._keeps_without_daemon:
                    raise lost_in_forward(loss) from loss
                position = -1
            self._planned.note_sizes(*follower.sizes)
            if position >= 0:
                self._planned.set_position(position)
            elif follower.follows_script:
                self._planned.leave_script()
        return self._planned.end()

    def _send_plan(self) -> None:
        """Tell the daemon of the plan that the block has followed, unless the daemon knows it."""
        if self._session is not None:
            plan = self._planned.unsent_plan(self._session)
            if plan is not None:
                self._session.apply_plan(plan, self._planned.budget)

    def abandon(self) -> None:
        """Drop all that was noted of a block that an exception has ended."""
        self._layers.end(self)
        self._end_launches()
        if self._follower is not None:
            self._follower.forget()
            self._follower = None
        self._planned.abandon()

    @property
    def hooks(self) -> Hooks:
        """The pack hook (tensor to autograd's object) and the unpack hook (object to tensor)."""
        if self._follower is not None:
            return self._follower.pack, self._follower.unpack
        return self._pack, self._unpacking.unpack

    @untraced
    def _pack_unexpected(self, tensor: torch.Tensor, position: int) -> Packed:
        """Pack a tensor that compiled code passes to Python; `position` is the step's event."""
        follower = self._follower
        if follower is None or not follower.follows_script:
            return self._pack(tensor)
        if (local := local_of(tensor)) is not None:
            return Distributed(tensor, follower.pack(local), follower.unpack)
        if position < 0:  # the step has departed from its script
            self._planned.set_position(-1 - position)
            self._planned.leave_script()
            follower.leave_script()
            return self._pack(tensor)
        self._planned.set_position(position)
        packed = self._pack(tensor)
        position = self._planned.position
        if position < 0:
            self._planned.leave_script()
            follower.leave_script()
        else:
            follower.continue_at(position)
        return packed

    @untraced
    def _pack_expected(self, tensor: torch.Tensor, position: int) -> Packed:
        """Offload a result that compiled code has matched with the script's event at `position`."""
        layer = self._planned.layer_at(position)
        try:
            decision = self._decide(tensor)
            if tensor.is_cuda and is_capturing(tensor.device):
                decision = Keep("capture")
            if isinstance(decision, Keep):
                return self._skip(tensor, decision.reason, layer)
            session = self._sessions.of(tensor.device)
            if session is None:
                return self._skip(tensor, "device", layer)
            if self._session is None:
                self._session = session
            self._let_others_wait(tensor, session)
            return self._offload(tensor, tensor.untyped_storage(), session, layer)
        except DaemonLost as loss:
            if not self._keeps_without_daemon:
                raise lost_in_forward(loss) from loss
            return self._keep_after_loss(tensor)

    @untraced
    def _pack_trial(
        self, tensor: torch.Tensor, position: int, recomputed: _follow.Recomputed
    ) -> Packed:
        """Offload a result that compiled code recomputes, so that both can be compared."""
        follower, nbytes = self._follower, tensor.untyped_storage().nbytes()
        packed = self._pack_expected(tensor, position)
        trial = self._planned.trial_at(position, nbytes)
        if follower is None or trial is None or not isinstance(packed, Handle):
            return packed
        return Tried(trial._replace(packed=packed), recomputed, follower.recompute)

    @untraced
    def _pack(self, tensor: torch.Tensor) -> Packed:
        """Return the object that autograd is to hold instead of `tensor`."""
        if HANDLED.depth:
            return self._skip(tensor, "compiled")
        if (local := local_of(tensor)) is not None:
            return Distributed(tensor, self._pack(local), self._unpacking.unpack)
        recording = self._planned.recording
        if recording is not None and self._session is not None and self._policy.layers is None:
            expected = recording.expected_keep(tensor)
            if expected is not None:
                return self._keep_counted(
                    tensor, tensor.nbytes, expected.keep_reason, expected.value.layer
                )
        try:
            return self._pack_by_decision(tensor)
        except DaemonLost as loss:
            if not self._keeps_without_daemon:
                raise lost_in_forward(loss) from loss
            return self._keep_after_loss(tensor)

    def _pack_by_decision(self, tensor: torch.Tensor) -> Packed:
        """Pack a tensor for which no script expects that it is kept.

        Raises:
            DaemonLost: the tensor was to be offloaded, and the daemon is gone.
        """
        decision = self._decide(tensor)
        if self._compiled is not None and not _is_no_activation(decision):
            self._compiled.count_saved(nbytes_of(tensor))
        if tensor.is_cuda and is_capturing(tensor.device):
            decision = Keep("capture")  # opening a session would already spoil the graph
        if isinstance(decision, Keep):
            return self._skip(tensor, decision.reason)
        session = self._sessions.of(tensor.device)
        if session is None:
            return self._skip(tensor, "device")
        if self._session is None:
            self._session = session
        storage, recording = tensor.untyped_storage(), self._planned.recording
        saved = None if recording is None else recording.saved(tensor, storage)
        if saved is None:  # saved by a backward pass after the block, or in a block without end
            return self._offload(tensor, storage, session)
        value, decision, result = saved
        if isinstance(decision, Keep):
            return self._skip(tensor, decision.reason, value.layer)
        if isinstance(decision, Replay) and result is not None:
            return self._recompute(tensor, storage, value, result, session)
        return self._offload(tensor, storage, session, value.layer)

    def _decide(self, tensor: torch.Tensor) -> Decision:
        """Return the policy's decision about a tensor."""
        is_expected = self._follower is not None and self._follower.follows_script
        return self._policy.decide(tensor, self._min_bytes, is_expected=is_expected)

    def _skip(self, tensor: torch.Tensor, reason: str, layer: str = "") -> KeptTensor:
        return self._keep_counted(tensor, nbytes_of(tensor), reason, layer)

    def _keep_counted(
        self, tensor: torch.Tensor, nbytes: int, reason: str, layer: str
    ) -> KeptTensor:
        self._recorder.of_layer(layer).skipped(nbytes, reason)
        kept = KeptTensor.keeping(tensor)
        if nbytes and reason not in NO_ACTIVATIONS:
            self._trace.saved(id(kept), "kept", nbytes)
            note(kept, nbytes)
        return kept

    def _keep_after_loss(self, tensor: torch.Tensor) -> KeptTensor:
        """Keep a tensor that was meant for a daemon that is lost."""
        self._recorder.saved(tensor.nbytes, 0.0)
        self._recorder.kept(tensor.nbytes, "daemon_lost")
        kept = KeptTensor.keeping(tensor)
        self._trace.saved(id(kept), "kept", tensor.nbytes)
        return kept

    def _recompute(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        value: RecordedValue,
        result: Result,
        session: Session,
    ) -> Replayed:
        """Have a tensor recomputed; offload it, too, until its recipe is proved."""
        trial = self._planned.trial(value.number, storage.nbytes())
        if trial is not None:
            packed = self._offload(tensor, storage, session, value.layer)
            trial = trial._replace(packed=packed)
        else:
            self._recorder.of_layer(value.layer).will_recompute(tensor.nbytes)
            self._trace.saved(id(result), "replayed", tensor.nbytes)
        return Replayed(
            result,
            View.of(tensor),
            SavedVersion.of(tensor, storage._cdata),
            trial=trial,
            checksum=checksum(storage) if self._planned.verifies else None,
        )

    def _pack_input(self, tensor: torch.Tensor, decision: Decision, layer: str) -> Packed:
        """Offload or keep an input of recipes; called right after an operation has run."""
        try:
            session = self._sessions.of(tensor.device)
            decided = decision, self._decide(tensor)
            if session is not None and not any(isinstance(one, Keep) for one in decided):
                self._let_others_wait(tensor, session)
                return self._offload(tensor, tensor.untyped_storage(), session, layer)
        except DaemonLost as loss:
            if not self._keeps_without_daemon:
                raise lost_in_forward(loss) from loss
        kept = KeptTensor.keeping(tensor)
        note(kept, tensor.nbytes)
        return kept

    def _let_others_wait(self, tensor: torch.Tensor, session: Session) -> None:
        """Have compiled code offload later results of a tensor's device several at once."""
        if self._follower is not None and self._results.session is None:
            self._results.session = session
            self._follower.batch_offloads(tensor, session.batch_bytes, session.has_in_place)

    def _offload(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        session: Session,
        layer: str = "",
    ) -> Handle:
        """Offload a tensor, or share the record of its storage."""
        recorder = self._recorder.of_layer(layer)
        record = session.find(storage, tensor)
        if record is not None:
            recorder.deduplicated(tensor.nbytes)
        else:
            record = self._hold(tensor, storage, session, recorder)
        if tensor.grad_fn is None and not tensor._is_view():  # holding a view would hold its base
            record.leaves[id(tensor)] = tensor
        version = SavedVersion.of(tensor, storage._cdata)
        handle = self._step.handle(record, View.of(tensor), version)
        session.saved.add_use(handle)
        return handle

    def _hold(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        session: Session,
        recorder: StatsRecorder,
    ) -> StoredRange:
        """Make a record for a storage without one, and send other records that may be sent now."""
        began, nbytes = perf_counter(), storage.nbytes()
        with ranges.span("pack", nbytes):
            record = session.hold(
                storage,
                tensor.dtype,
                self._codec,
                recorder,
                soon=session.has_in_place and self._step.needed_at_once(nbytes),
                proof=SnapshotProof(tensor) if is_result(tensor) else None,
            )
            if record.proof is not None:
                self._results.send_at_end(record)
        recorder.saved(tensor.nbytes, perf_counter() - began)
        self._trace.paused("store", began)
        self._trace.saved(id(record), "offloaded", nbytes)
        return record


def _is_no_activation(decision: object) -> bool:
    return isinstance(decision, Keep) and decision.reason in NO_ACTIVATIONS
