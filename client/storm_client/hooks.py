"""The saved-tensor hooks: what autograd calls when it saves a tensor and when it wants it back.

Unpack returns what PyTorch's own saved tensor would be at that moment, in bits, shape, strides and
dtype, or raises. A tensor that is not offloaded stays, and gets the version check that PyTorch
leaves out for hooked tensors.

An Offload may be entered in several threads at once and inside itself: every `with` block is a
step of its own, and PyTorch applies the innermost pair of hooks of the thread.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from copy import deepcopy
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from storm_client import ranges
from storm_client.blocks import Blocks, Leaving, untraced
from storm_client.compiled import HANDLED, CompiledModels
from storm_client.errors import (
    DaemonLost,
    StormError,
    UsageError,
    lost_in_backward,
    lost_in_forward,
)
from storm_client.layers import Layers
from storm_client.little_saved import FirstSteps, advice
from storm_client.plan import Decision, Keep, OrderHistory, Replay, Step, slice_bytes
from storm_client.plan.planning import Planning, PlanOptions
from storm_client.plan.recipes import Replayed, Result, Trial, checksum, compare, same_bits
from storm_client.policy import NO_ACTIVATIONS, Policy
from storm_client.report import Report
from storm_client.saved import Handle, RangePhase, StoredRange
from storm_client.stats import OffloadStats, StatsRecorder
from storm_client.storages import Ready, SnapshotProof, View, is_result
from storm_client.summary import Summary, say
from storm_client.trace import Traces
from storm_client.versions import KeptTensor, SavedVersion

if TYPE_CHECKING:
    from types import TracebackType

    from torch.overrides import TorchFunctionMode

    from storm_client.plan.kinds import Value
    from storm_client.plan.table import Plan
    from storm_client.session import Session
    from storm_client.sessions import Sessions
    from storm_client.supply import Supply

__all__ = ["Offload"]

SETTLE_SECONDS = 1.0
"""How long stats() waits for the daemon to have encoded what was stored last."""

Packed = Handle | KeptTensor | Replayed


class Offload:
    """Offloads what autograd saves inside its `with` blocks; made by Client.offload."""

    def __init__(self, *_: object, **__: object) -> None:
        """Offloads are made by `storm_client.offload` and Client.offload.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "an Offload is made by storm_client.offload(model), or by connect() and "
            "client.offload(model), which take a module or a list of modules, min_bytes and codec"
        )

    @classmethod
    def of(cls, supply: Supply, policy: Policy, codec: str, options: PlanOptions) -> Offload:
        """Return one that uses the sessions of a client, whose life is not its business."""
        offload = cls.__new__(cls)
        offload._begin(supply, policy, codec, options)
        return offload

    def _begin(
        self, supply: Supply | None, policy: Policy, codec: str, options: PlanOptions
    ) -> None:
        self._supply = supply
        self._policy = policy
        self._codec = codec
        self._recorder = StatsRecorder()
        self._history = OrderHistory()
        self._first_steps = FirstSteps()
        self._summary = Summary()
        self._traces = Traces()
        self._compiled = CompiledModels()
        self._planning = Planning(options, self._recorder.ratio, Layers(policy.modules))
        self.blocks = Blocks()

    @untraced
    def __enter__(self) -> Offload:
        """Begin a step in this thread.

        Raises:
            UsageError: the client is closed or forked, or the budget cannot be kept.
            DaemonLost: the client is without its daemon.
        """
        if self._first_steps.is_due():
            self._look_back()
        line = self._summary.step_begins(
            perf_counter(),
            self._recorder,
            self._policy.small_owned_bytes,
            lambda: self._planning.is_on_gpu,
        )
        if line is not None:
            say(line)
        supply = self._found()
        sessions = supply.current()
        sessions.sweep()
        self._policy.refresh()
        self._compiled.look(self._policy.modules)
        step = _StepHooks(
            sessions,
            self._policy,
            self._codec,
            self._recorder,
            self._history,
            planning=self._planning,
            keeps=supply.keeps,
            traces=self._traces,
        )
        self.blocks.enter(step)
        return self

    if TYPE_CHECKING:

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            """End the step; what it saved lives as long as the graph that needs it."""
    else:
        __exit__ = Leaving()

    def stats(self) -> OffloadStats:
        """Return what was done so far, waiting up to a second for stores under way to end."""
        if self._supply is not None:
            self._supply.sessions.settle(SETTLE_SECONDS)
        return self._recorder.snapshot()

    def report(self) -> Report:
        """Return what was done so far, by layer, with the plan and the latest step in time.

        Printed it is a table, in a notebook also a picture; `draw(path)` writes the picture. It
        waits as `stats` does.

        Raises:
            UsageError: the budget cannot be kept.
        """
        stats = self.stats()
        return Report(
            stats=stats,
            layers=self._recorder.layers(),
            steps=self._summary.begun,
            plan=self.plan,
            timeline=self._traces.timeline(),
        )

    @property
    def plan(self) -> Plan | None:
        """What becomes of the saved tensors of the latest kind of step; None until learned.

        Raises:
            UsageError: the budget cannot be kept.
        """
        return self._planning.plan()

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        """Return one of the same client for the copied modules, with statistics of its own."""
        copied = memo[id(self)] = type(self).__new__(type(self))  # the modules may refer to it
        modules = deepcopy(self._policy.modules, memo)
        policy = Policy(modules, self._policy.min_bytes)
        copied._begin(self._supply, policy, self._codec, self._planning.options)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return what was asked for: all else belongs to this process."""
        policy = self._policy
        return {
            "modules": policy.modules,
            "min_bytes": policy.min_bytes,
            "codec": self._codec,
            "options": self._planning.options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew; the first block finds a daemon."""
        policy = Policy(state["modules"], state["min_bytes"])
        self._begin(None, policy, state["codec"], state["options"])

    def _look_back(self) -> None:
        """Warn where the first steps had little saved; called by `__enter__`."""
        staying, steps = self._recorder.staying(), self._first_steps.begun - 1
        if not staying.saved_bytes:
            self._first_steps.look_later()
            return
        modules = self._policy.modules
        parameters = chain.from_iterable(module.parameters() for module in modules)
        text = advice(staying, steps, self._policy.min_bytes, parameters)
        if text is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _found(self) -> Supply:
        """Return where the sessions come from: for one that was unpickled, the shared client."""
        if self._supply is None:
            from storm_client.connect import shared_supply  # makes Offloads

            self._supply = shared_supply()
        return self._supply


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
        planning: Planning,
        keeps: bool,
        traces: Traces,
    ) -> None:
        self._traces = traces
        self._trace = traces.begin(recorder)
        self._sessions = sessions
        self._keeps = keeps
        self._policy = policy
        self._codec = codec
        self._recorder = recorder
        self._step = Step(history)
        self._results: list[weakref.ref[StoredRange]] = []
        """Records of results, which leave at the end at the latest."""
        self._planned = planning.begin(
            policy.min_bytes,
            policy.modules,
            pack=self._pack_input,
            unpack=self._bring,
            publish=self._publish_ready,
            is_ready=self._leave_when_ready,
        )
        self._replaying = threading.RLock()  # protects all results of the step, and what follows
        self._session: Session | None = None
        """That of the first tensor, which the daemon is told of the plan by."""
        self._brought = 0.0
        """Seconds spent on bringing inputs of replays, which count as waiting."""

    @property
    def mode(self) -> TorchFunctionMode | None:
        """What has to see PyTorch's functions in the block."""
        return self._planned.mode

    def end(self) -> None:
        """Send what the block has saved and may leave: nothing is saved in it any more.

        Results leave now though somebody still holds them: their changes are counted.
        """
        self._tell()
        self._planned.end()
        results = [record for reference in self._results if (record := reference()) is not None]
        self._results.clear()
        try:
            self._sessions.send_unshared()
            for record in results:
                if record.phase is RangePhase.IN_USE:
                    record.session.send(record)
            self._planned.handed_over()
        except DaemonLost as loss:
            if not self._keeps:
                raise lost_in_forward(loss) from loss

    def _tell(self) -> None:
        """Tell the daemon of the plan that the block has followed, unless it knows it."""
        if self._session is not None:
            plan = self._planned.news_for(self._session)
            if plan is not None:
                self._session.tell(plan, self._planned.budget)

    def abandon(self) -> None:
        """Let go of what was noted of a block that an exception has ended."""
        self._planned.abandon()

    @untraced
    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return what autograd is to hold instead of `tensor`."""
        if HANDLED.depth:
            return self._skip(tensor, "compiled")
        if self._session is not None and self._policy.layers is None:
            expected = self._planned.staying(tensor)
            if expected is not None:
                return self._stay(tensor, tensor.nbytes, expected.stays, expected.value.layer)
        return self._consider(tensor)

    def _consider(self, tensor: torch.Tensor) -> Packed:
        """Do what becomes of a tensor that no script expects to stay."""
        decision = self._policy.decide(tensor)
        if isinstance(decision, Keep):
            return self._skip(tensor, decision.reason)
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._skip(tensor, "capture")  # already opening a session would spoil the graph
        storage = tensor.untyped_storage()
        decision = self._policy.decide_storage(storage)
        if isinstance(decision, Keep):
            return self._skip(tensor, decision.reason)
        try:
            session = self._sessions.of(tensor.device)
            return (
                self._skip(tensor, "device")
                if session is None
                else self._decide(tensor, storage, session)
            )
        except DaemonLost as loss:
            if not self._keeps:
                raise lost_in_forward(loss) from loss
            return self._keep(tensor)

    @untraced
    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor that was packed.

        Raises:
            RuntimeError: it was changed in place since.
            CorruptBlob, ActivationLost, DaemonLost: its bytes cannot be had again.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # PyTorch will set the version of what is returned
                return self.unpack(packed)
        self._planned.asked()
        version = packed if isinstance(packed, KeptTensor) else packed.version
        version.check()
        replaced = version.replaced()
        if replaced is not None:
            return replaced
        if isinstance(packed, KeptTensor):
            self._traces.used(self._trace)
            self._trace.used(id(packed))
            return packed.token
        return self._replay(packed) if isinstance(packed, Replayed) else self._load(packed)

    def _load(self, handle: Handle) -> torch.Tensor:
        is_first = self._step.unpacked(handle)
        record = handle.record
        began = perf_counter()
        with ranges.span("unpack", record.nbytes, record.key):
            try:
                located = record.session.load(handle, is_first=is_first)
            except DaemonLost as loss:
                raise lost_in_backward(loss, keeps=self._keeps) from loss
        ready = record.ready
        if ready is not None and ready.trial is not None:
            record.ready = None
            ready.trial.compare(located.storage)
        self._traces.used(self._trace)
        self._trace.used(id(record))
        if record.away < record.nbytes:
            self._trace.used(-record.key)
        if not located.is_original:
            self._recorder.restored(self._trace.paused("wait", began))
        return handle.version.alias(handle.view.rebuild(located.storage))

    def _skip(self, tensor: torch.Tensor, reason: str, layer: str = "") -> KeptTensor:
        return self._stay(tensor, _nbytes(tensor), reason, layer)

    def _stay(self, tensor: torch.Tensor, nbytes: int, reason: str, layer: str) -> KeptTensor:
        self._recorder.of_layer(layer).skipped(nbytes, reason)
        kept = KeptTensor.keeping(tensor)
        if nbytes and reason not in NO_ACTIVATIONS:
            self._trace.saved(id(kept), "stays", nbytes)
        return kept

    def _keep(self, tensor: torch.Tensor) -> KeptTensor:
        """Leave to memory what was meant for a daemon that is lost."""
        self._recorder.saved(tensor.nbytes, 0.0)
        self._recorder.kept(tensor.nbytes, "daemon_lost")
        kept = KeptTensor.keeping(tensor)
        self._trace.saved(id(kept), "stays", tensor.nbytes)
        return kept

    def _decide(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, session: Session
    ) -> Packed:
        """Do what the step's plan says of a tensor that may leave."""
        if self._session is None:
            self._session = session
        saved = self._planned.saved(tensor, storage)
        if saved is None:
            return self._offload(tensor, storage, session)
        value, decision, result = saved
        if isinstance(decision, Keep):
            return self._skip(tensor, decision.reason, value.layer)
        if isinstance(decision, Replay) and result is not None:
            return self._give_up(tensor, storage, value, result, session)
        return self._offload(tensor, storage, session, value.layer, slice_bytes(decision))

    def _give_up(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        value: Value,
        result: Result,
        session: Session,
    ) -> Replayed:
        """Have a tensor made again; hand it over, too, until its recipe has proved itself."""
        trial = self._planned.trial(value.number)
        if trial is not None:
            packed = self._offload(tensor, storage, session, value.layer)
            trial = trial._replace(packed=packed)
        else:
            self._recorder.of_layer(value.layer).gives_up(tensor.nbytes)
            self._trace.saved(id(result), "replayed", tensor.nbytes)
        return Replayed(
            result,
            View.of(tensor),
            SavedVersion.of(tensor, storage._cdata),
            trial=trial,
            checksum=checksum(storage) if self._planned.verifies else None,
        )

    def _pack_input(self, tensor: torch.Tensor, decision: Decision, layer: str) -> Packed:
        """Hand over what others are to be made from; called where an operation has run."""
        try:
            session = self._sessions.of(tensor.device)
            if session is None or isinstance(decision, Keep) or self._stays(tensor):
                return KeptTensor.keeping(tensor)
            storage = tensor.untyped_storage()
            return self._offload(tensor, storage, session, layer, slice_bytes(decision))
        except DaemonLost as loss:
            if not self._keeps:
                raise lost_in_forward(loss) from loss
            return KeptTensor.keeping(tensor)

    def _publish_ready(self, tensor: torch.Tensor) -> int:
        """Return a number that tells when `tensor` has been made; 0 where nobody asks for that."""
        try:
            session = self._sessions.of(tensor.device)
            return 0 if session is None else session.publish_ready()
        except DaemonLost:
            return 0

    def _leave_when_ready(self, tensor: torch.Tensor, ready: Ready) -> None:
        """Have a result leave as it was made, if the function that made it has saved it."""
        try:
            session = self._sessions.of(tensor.device)
            if session is not None:
                session.saved_before_ready(tensor.untyped_storage(), ready)
        except DaemonLost as loss:
            if not self._keeps:
                raise lost_in_forward(loss) from loss

    def _stays(self, tensor: torch.Tensor) -> bool:
        return isinstance(self._policy.decide(tensor), Keep) or isinstance(
            self._policy.decide_storage(tensor.untyped_storage()), Keep
        )

    def _bring(self, packed: Handle | KeptTensor) -> torch.Tensor:
        """Return an input as it was when it was handed over."""
        if isinstance(packed, KeptTensor):
            packed.check()
            return packed.token
        packed.version.check()
        began = perf_counter()
        tensor = self._load(packed)
        self._brought += perf_counter() - began
        return tensor

    def _replay(self, replayed: Replayed) -> torch.Tensor:
        """Return a tensor that is made again, or, the first times, the tensor itself."""
        with self._replaying:
            if replayed.trial is not None:
                return self._try(replayed, replayed.trial)
            began, brought = perf_counter(), self._brought
            with ranges.span("replay", replayed.result.nbytes):
                tensor = replayed.result.viewed(replayed.view)
            replayed.result.given(replayed.version)
            waited = self._brought - brought
        if replayed.checksum is not None:
            compare(replayed.checksum, tensor.untyped_storage())
        self._traces.used(self._trace)
        self._trace.used(id(replayed.result))
        self._recorder.replayed(self._trace.paused("replay", began) - waited)
        return replayed.version.alias(tensor)

    def _try(self, replayed: Replayed, trial: Trial) -> torch.Tensor:
        """Return the tensor that was handed over, and note whether its recipe makes the same."""
        tensor = self._bring(trial.packed)
        try:
            if self._planned.has_parted and not replayed.result.has_recipe:
                pass  # what made it ran when another kind of step was expected
            elif same_bits(replayed.result.made().untyped_storage(), tensor.untyped_storage()):
                trial.verified.add(trial.number)
            else:
                trial.kind.reject(trial.number, "made again it had other bits")
        except DaemonLost:
            raise
        except (RuntimeError, StormError) as error:
            trial.kind.reject(trial.number, f"could not be made again: {error}")
        return tensor if isinstance(trial.packed, Handle) else replayed.version.alias(tensor)

    def _offload(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        session: Session,
        layer: str = "",
        stays: int = 0,
    ) -> Handle:
        """Have a tensor leave, but for the last bytes of its storage, as many as `stays` says."""
        recorder = self._recorder.of_layer(layer)
        record = session.find(storage, tensor)
        if record is not None:
            recorder.deduplicated(tensor.nbytes)
        else:
            record = self._hold(tensor, storage, session, recorder, stays)
        if tensor.grad_fn is None and not tensor._is_view():  # a view would hold its base
            record.leaves[id(tensor)] = tensor
        version = SavedVersion.of(tensor, storage._cdata)
        handle = self._step.handle(record, View.of(tensor), version)
        session.saved.add_handle(handle)
        return handle

    def _hold(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        session: Session,
        recorder: StatsRecorder,
        stays: int,
    ) -> StoredRange:
        """Make the record of a storage that has none, and send others that may leave now."""
        began = perf_counter()
        nbytes = storage.nbytes()
        with ranges.span("pack", nbytes):
            record = session.hold(
                storage,
                tensor.dtype,
                self._codec,
                recorder,
                soon=self._step.needed_at_once(nbytes),
                proof=SnapshotProof(tensor) if is_result(tensor) else None,
                stays=stays if stays < nbytes else 0,
                ready=self._planned.ready(tensor, storage),
            )
            if record.proof is not None:
                self._results.append(weakref.ref(record))
        recorder.saved(tensor.nbytes, perf_counter() - began)
        self._trace.paused("store", began)
        self._trace.saved(id(record), "offloaded", record.away)
        if record.away < nbytes:
            self._trace.saved(-record.key, "stays", nbytes - record.away)
        return record


def _nbytes(tensor: torch.Tensor) -> int:
    """Return a tensor's bytes as far as they are known: 0 for sparse and nested ones."""
    return tensor.nbytes if tensor.layout is torch.strided and not tensor.is_nested else 0
