"""One step of an Offload that has plans: what follows the step, and what is learned from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from storm_client.eager.launches import LaunchWatch
from storm_client.eager.marks import Mark
from storm_client.eager.proofs import Trial
from storm_client.eager.recorder import Recorder
from storm_client.eager.recording import Recording
from storm_client.eager.signature import StepSignature

if TYPE_CHECKING:
    from storm_client.eager.controller import Planning
    from storm_client.eager.recognition import StepRecord
    from storm_client.native import _follow
    from storm_client.planner.plan import Plan
    from storm_client.planner.problem import PlainLoss

__all__ = ["PlannedStep"]

_HOST: Final = torch.device("cpu")


@dataclass(eq=False)
class PlannedStep:
    """One step, in the thread of its block."""

    planning: Planning
    record: StepRecord
    min_bytes: int
    """Minimum size in bytes of the tensors that the step handles."""
    start_recording: Callable[[], Recording]
    """Returns a new recording of the step."""
    begun: Mark
    """When its device begins it."""
    fills: bool
    """Whether the device's queue is kept full in its forward pass."""
    counts: bool
    """Whether later steps by the same plan will take as long."""
    script: _follow.Script | None
    """The script that compiled code may follow from the step's begin; None if Python has to."""
    watcher: _follow.CallLog | None
    """Logs the calls of a step that Python watches."""
    mode: Recorder | None = None
    """Watches PyTorch's functions in such a step."""
    launches: LaunchWatch | None = None
    """Reports the kernel launches of such a step."""

    def __post_init__(self) -> None:
        """Begin the step."""
        self._recording: Recording | None = None
        self._has_ended = False
        self.verifies = self.planning.options.verifies
        self.budget = self.planning.options.budget
        self.costs = self.planning.maker.costs
        self._began = perf_counter()
        self._tries = False
        self._proofs: deque[Trial] = deque()
        self._followed = None if self.script is None else self.record.script
        """The Python script from which the script for compiled code was made."""
        signature = self.record.signature
        self.record.is_native = (
            self.script is not None and signature is not None and signature.may_replay
        )

    @property
    def recording(self) -> Recording | None:
        """Returns the decision for each saved tensor; None once the block has ended.

        Compiled code mostly needs none, so it is made when Python looks at a tensor.
        """
        if self._recording is None and not self._has_ended:
            self._recording = self.start_recording()
        return self._recording

    # --- what is expected of it -------------------------------------------------------------

    @property
    def has_launches(self) -> bool:
        """Whether steps of its signature launch kernels that must be reported to compiled code."""
        signature = self.record.signature
        return signature is not None and signature.may_replay and signature.has_launches

    @property
    def device(self) -> torch.device:
        """The device with the most bytes of values of its expected signature."""
        signature = self.record.signature
        return _HOST if signature is None else signature.clock or _HOST

    @property
    def has_unsent_plan(self) -> bool:
        """Whether no live session has received the plan that the step is expected to follow."""
        plan = self.record.plan
        return plan is not None and (plan.last_session is None or plan.last_session() is None)

    def unsent_plan(self, session: object) -> Plan | None:
        """Return the plan that the step follows, unless this session was the last to ask for it."""
        plan = self.record.plan
        return None if plan is None else plan.unsent_plan(session)

    @property
    def has_diverged(self) -> bool:
        """Whether an event of the step differed from its expected signature."""
        return self.record.has_diverged

    # --- for compiled code ------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The number of events so far of the script that compiled code follows.

        -1 if the step has left that script.
        """
        return self.record.count if self.record.script is self._followed else -1

    def set_position(self, position: int) -> None:
        """Note that compiled code has seen the first `position` events of the script."""
        if self.record.script is self._followed:
            self.record.set_position(position)

    def leave_script(self) -> None:
        """Note that the step has left the script that compiled code was following.

        Nobody has watched the step's functions. If its plan recomputes something, nothing can be
        learned from the step.
        """
        signature = self.record.signature
        if self._followed is not None and signature is not None and signature.may_replay:
            self.record.stop()
            signature.fallback.begin()

    def layer_at(self, position: int) -> str:
        """Return the layer in which the value of a script's event is made."""
        return "" if self._followed is None else self._followed[position].value.layer

    def layer(self, number: int) -> str:
        """Return the layer in which a value is made; empty where it is not known."""
        return self.record.layer(number)

    def pack_input(self, tensor: torch.Tensor, number: int) -> Any:
        """Keep or offload a value from which others are recomputed; see `RecipeMaker`."""
        return None if self.recording is None else self.recording.pack_input(tensor, number)

    def note_sizes(self, saved_bytes: int, larger: Iterable[tuple[int, int]]) -> None:
        """Record the sizes that compiled code has seen; see `StepRecord`."""
        self.record.saved_bytes_with_repeats += saved_bytes
        self.record.larger.update(larger)

    def note_loss(self, plain: PlainLoss) -> None:
        """Record what PyTorch's own loss would take beyond one computed in tiles."""
        self.record.plain_loss = self.record.plain_loss.or_larger(plain)

    # --- trials -----------------------------------------------------------------------------

    def trial(self, number: int, nbytes: int) -> Trial | None:
        """Return a trial for a value whose recomputation is not proved at this size, else None."""
        signature, plan = self.record.signature, self.record.plan
        if signature is None or plan is None:
            return None
        evidence = signature.evidence
        if evidence.recomputed.holds(plan.ways[number], nbytes):
            return None
        self._tries |= evidence.count_trial(number)
        return Trial(signature, number, plan, nbytes)

    def trial_at(self, position: int, nbytes: int) -> Trial | None:
        """Return the same for an event of the script that compiled code follows."""
        followed = self._followed
        return None if followed is None else self.trial(followed[position].value.number, nbytes)

    def prove(self, trial: Trial) -> None:
        """Record that a trial has found the same bits, if the step ends with the trial's signature.

        A step of another signature may write uncounted where this signature does not, or the
        reverse, so it proves nothing. Nor does one that held some inputs otherwise than planned.
        """
        self._proofs.append(trial)
        if self._has_ended:
            self._note_proofs()

    def _note_proofs(self) -> None:
        with suppress(IndexError):  # several backward threads may take trials
            while True:
                trial = self._proofs.popleft()
                is_of_its_plan = trial.signature is self.record.ended_as
                if is_of_its_plan and not self.record.has_outgrown_plan:
                    trial.succeed()

    # --- its end ----------------------------------------------------------------------------

    def end(self) -> StepSignature | None:
        """Learn from the step; nothing runs or is saved in it any more.

        Returns the signature whose plan the forward pass has followed to the end, else None.
        """
        followed = None
        if not self._has_ended:
            self._note_calls()
            followed = self.planning.ended(
                self, pass_seconds=perf_counter() - self._began, tries=self._tries
            )
        self.abandon()
        return followed

    def _note_calls(self) -> None:
        """Record the step's calls in its plan, so that compiled code can follow later steps."""
        logged = None if self._recording is None else self._recording.logged()
        plan = self.record.plan
        if logged is not None and plan is not None and plan.script is self.record.script:
            plan.logged[:] = logged

    def abandon(self) -> None:
        """Forget what the step has done so far; nothing runs or is saved in it any more."""
        self._has_ended = True
        recording, self._recording = self._recording, None
        if self._proofs:
            self._note_proofs()
        if self.mode is not None:
            self.mode.end()
            if self.mode.meets_compiled_code:
                self.planning.maker.met_compiled_code()
        if recording is not None:
            recording.end()
