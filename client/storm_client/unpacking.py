"""What becomes of saved tensors in the backward pass: each comes back as it was, or raises.

Unpack returns what PyTorch's own saved tensor would be at that moment, in bits, shape, strides and
dtype. A tensor that stayed gets the version check that PyTorch leaves out for hooked tensors.
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
from storm_client.eager.sources import OtherNumbers
from storm_client.errors import DaemonLost, StormError, lost_in_backward
from storm_client.hook_stack import untraced
from storm_client.monitoring import profiler_ranges as ranges
from storm_client.planner import Step
from storm_client.saved.distributed import Distributed
from storm_client.saved.ranges import Handle, Located, Use
from storm_client.saved.versions import KeptTensor, SavedVersion
from storm_client.transport.confirmation import acts_on_gradients_early

if TYPE_CHECKING:
    from collections.abc import Callable

    from storm_client.eager.planned_step import PlannedStep
    from storm_client.eager.recorder import Mark
    from storm_client.eager.signature import StepSignature
    from storm_client.monitoring.stats import StatsRecorder
    from storm_client.monitoring.trace import StepTrace, Untraced
    from storm_client.native import _follow
    from storm_client.policy import Policy

__all__ = ["Packed", "Tried", "Unpacking"]


class Tried(NamedTuple):
    """What autograd holds for a tensor that compiled code recomputes and that is handed over, too.

    So it is at a size at which the two were not compared yet.
    """

    trial: Trial
    recomputed: _follow.Recomputed
    recompute: Callable[[_follow.Recomputed], torch.Tensor | None]

    @property
    def version(self) -> SavedVersion:
        """That of the tensor."""
        packed: Handle = self.trial.packed
        return packed.version


Packed = Handle | KeptTensor | Replayed | Tried | Distributed


class Unpacking:
    """Of one step. The graph keeps it alive for as long as it has handles."""

    def __init__(self, policy: Policy, recorder: StatsRecorder, *, keeps: bool) -> None:
        """Count by `recorder`; `keeps` says whether later steps do without a lost daemon."""
        self.turn: tuple[StepSignature, Mark] | None = None
        """The signature that the forward pass has followed, and when it had handed over all; None
        once the backward pass has asked for something."""
        self._policy = policy
        self._recorder = recorder
        self._keeps = keeps
        self._replaying = threading.RLock()  # protects all results of the step, and what follows
        self._brought = 0.0
        """Seconds spent on bringing inputs of replays, which count as waiting."""

    def begin(self, planned: PlannedStep, trace: StepTrace | Untraced) -> None:
        """Note what the step is, before anything is saved in it."""
        self._planned = planned
        self._trace = trace
        self._notes_costs = planned.script is not None
        """Whether compiled code follows the step: what learns takes longer."""

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
        if isinstance(packed, (Handle, Distributed)):
            return self._load(packed) if isinstance(packed, Handle) else packed.unpack()
        replaced = self._asked(packed if isinstance(packed, KeptTensor) else packed.version)
        if replaced is not None:
            return replaced
        if isinstance(packed, Replayed):
            return self._replay(packed)
        if isinstance(packed, Tried):
            return self._try(packed.trial, lambda: packed.recompute(packed.recomputed))
        self._trace.used(id(packed))
        return self._kept(packed)

    def _kept(self, kept: KeptTensor) -> torch.Tensor:
        """Return a tensor that was kept, wherever it is by now."""
        token = kept.token  # before it is looked at whether another thread has moved it
        return token if kept.moved is None else self._load(kept.moved)

    @cached_property
    def _may_hand_out(self) -> bool:
        """Whether memory may be used before it is known that the daemon has restored it."""
        return not acts_on_gradients_early(self._policy.modules)

    def _asked(self, version: SavedVersion) -> torch.Tensor | None:
        """Note that what was saved at `version` is needed; return what PyTorch uses in its stead.

        Raises:
            RuntimeError: it was changed in place since.
        """
        self.note_asked()
        version.check()
        return version.replaced()

    def note_asked(self) -> None:
        """Note that the backward pass asks for something."""
        turn, self.turn = self.turn, None
        if turn is not None:
            signature, ended = turn
            signature.times.turned(ended.until_now())

    def _load(self, handle: Handle, *, is_input: bool = False) -> torch.Tensor:
        """Return what was saved, or what has been given other data since; an input as it was saved.

        Raises:
            RuntimeError, CorruptBlob, ActivationLost, DaemonLost: as `unpack`.
        """
        if is_input:
            handle.version.check()
        elif (replaced := self._asked(handle.version)) is not None:
            return replaced
        return handle.version.alias(handle.view.rebuild(self.load_bytes(handle)))

    @untraced
    def load_bytes(self, use: Use) -> torch.UntypedStorage:
        """Return the bytes of what was saved, in memory that streams may use in their order.

        Raises:
            CorruptBlob, ActivationLost, DaemonLost: as `unpack`.
        """
        assert isinstance(use.step, Step)  # this one, or that of what was moved
        is_first = use.step.unpacked(use)
        record = use.record
        began, worked = perf_counter(), thread_time()
        try:
            if ranges.are_wanted():
                with ranges.span("unpack", record.nbytes, record.key):
                    located = self._located(use, is_first=is_first)
            else:
                located = self._located(use, is_first=is_first)
        except DaemonLost as loss:
            raise lost_in_backward(loss, keeps=self._keeps) from loss
        ready = record.ready
        if ready is not None and ready.trial is not None:
            record.ready = None
            if ready.trial.is_same(located.storage):
                self._planned.prove(ready.trial)
            else:
                ready.trial.fail()
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

    def bring(self, packed: Handle | KeptTensor) -> torch.Tensor:
        """Return an input as it was when it was handed over."""
        if isinstance(packed, KeptTensor):
            packed.check()
            return self._kept(packed)
        began = perf_counter()
        tensor = self._load(packed, is_input=True)
        self._brought += perf_counter() - began
        return tensor

    def _replay(self, replayed: Replayed) -> torch.Tensor:
        """Return a tensor that is recomputed, or, the first times, the tensor itself."""
        with self._replaying:
            if replayed.trial is not None:
                tensor = self._try(replayed.trial, lambda: self._tried(replayed.result))
                is_handle = isinstance(replayed.trial.packed, Handle)
                return tensor if is_handle else replayed.version.alias(tensor)
            began, brought = perf_counter(), self._brought
            with ranges.span("replay", replayed.result.nbytes):
                tensor = replayed.result.viewed(replayed.view)
            replayed.result.given(replayed.version)
            waited = self._brought - brought
        if replayed.checksum is not None:
            compare(replayed.checksum, tensor.untyped_storage())
        self._trace.used(id(replayed.result))
        self._recorder.replayed(self._trace.paused("replay", began) - waited)
        return replayed.version.alias(tensor)

    def _try(self, trial: Trial, recompute: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        """Return the tensor that was handed over, and note whether its recipe makes the same."""
        tensor = self.bring(trial.packed)
        try:
            made = recompute()
            if made is None:
                pass  # what made it ran when another step signature was expected
            elif same_bits(made.untyped_storage(), tensor.untyped_storage()):
                self._planned.prove(trial)
            else:
                trial.fail("recomputed, it had other bits")
        except (DaemonLost, OtherNumbers):
            raise
        except (RuntimeError, StormError) as error:
            trial.fail(f"could not be recomputed: {error}")
        return tensor

    def _tried(self, result: Result) -> torch.Tensor | None:
        """Return what a recipe makes; None where the step that was to make one has parted."""
        return None if self._planned.has_parted and not result.has_recipe else result.made()
