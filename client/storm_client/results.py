"""Results of operations, and how they leave: their changes are counted, whoever holds them still.

Compiled code keeps them for now, and has those leave together that nobody else holds. At the end of
their block all leave.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import chain
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

from storm_client.errors import DaemonLost, lost_in_forward
from storm_client.hook_stack import untraced
from storm_client.monitoring.shared_counts import RangeRecorder, SharedRecorder
from storm_client.planner import Keep, Step
from storm_client.saved.ranges import RangePhase, StoredRange, Use
from storm_client.saved.snapshots import SnapshotProof
from storm_client.transport.session import LOOK_BACK

if TYPE_CHECKING:
    import torch

    from storm_client.eager.planned_step import PlannedStep
    from storm_client.monitoring.stats import StatsRecorder
    from storm_client.native import _follow
    from storm_client.policy import Policy
    from storm_client.transport.session import Session

__all__ = ["Results"]


class Results:
    """Of one step."""

    def __init__(
        self,
        planned: PlannedStep,
        step: Step,
        policy: Policy,
        recorder: StatsRecorder,
        *,
        least: int,
        codec: str,
        keeps: bool,
    ) -> None:
        """Know none yet. What has fewer than `least` bytes stays.

        `keeps` says whether the step goes on without a lost daemon.
        """
        self.session: Session | None = None
        """That of what compiled code keeps for now."""
        self._planned = planned
        self._step = step
        self._policy = policy
        self._least = least
        self._codec = codec
        self._recorder = recorder
        self._keeps = keeps
        self._records: list[weakref.ref[StoredRange]] = []
        """Which leave at the end at the latest."""

    def note(self, record: StoredRange) -> None:
        """Have the record of a result leave at the end at the latest."""
        self._records.append(weakref.ref(record))

    def send(self) -> None:
        """Send all that have not left.

        Raises:
            DaemonLost: a daemon is gone. What it has not admitted stays.
        """
        records = [record for reference in self._records if (record := reference()) is not None]
        self._records.clear()
        for record in records:
            if record.phase is RangePhase.IN_USE:
                record.session.send(record)

    @untraced
    def leave_together(self, kept: list[_follow.Kept]) -> None:
        """Have results leave that compiled code has kept for now; what an error leaves stays."""
        session = self.session
        assert session is not None, "what is kept for now is of its device"
        try:
            with session.connection.lock:
                for one in kept:
                    self._leave(one, session)
            session.send_unshared(latest=len(kept) + LOOK_BACK)
        except DaemonLost as loss:
            left = filter(None, (one.describe() for one in kept))
            self._stay(loss, (nbytes for _, _, nbytes, *_ in left))

    @untraced
    def leave_unshared(self, units: list[_follow.Unit]) -> list[Use] | None:
        """Have results leave, as one range each unit; None where they are to be kept.

        Nobody else holds them or their copies, so that nobody can find or write to either.
        """
        session, began, worked = self.session, perf_counter(), thread_time()
        assert session is not None, "what is kept for now is of its device"
        records, uses = [], []
        try:
            for storage, dtype, members in units:
                record = session.record(storage, dtype, self._codec, self._recorder_of(members))
                records.append(record)
                uses.append(use := self._step.first_use(record))
                session.saved.add_use(use)
            session.send_results(records)
        except DaemonLost as loss:
            members_of_all = chain.from_iterable(members for _, _, members in units)
            self._stay(loss, (nbytes for _, nbytes, _ in members_of_all))
            return None
        seconds = perf_counter() - began
        if session.has_in_place:  # otherwise the thread copies: bytes have a figure of their own
            self._planned.costs.stored((thread_time() - worked) / len(units))
        for record, (_, _, members) in zip(records, units, strict=True):
            record.stats.saved(members[0][1], seconds)
            seconds = 0.0
        return uses

    @untraced
    def leave_made(self, number: int, tensor: torch.Tensor) -> Use | None:
        """Have the value of that number leave though somebody holds it; None where it may not.

        It has been made on its device's default stream, and is all of its storage.
        """
        session, nbytes = self.session, tensor.nbytes
        began, worked = perf_counter(), thread_time()
        if session is None or not session.has_in_place:
            return None
        if not self._planned.leaves_as_made(number, nbytes):
            return None
        storage = tensor.untyped_storage()  # Python's object counts as one who holds it
        if session.saved.find(storage) is not None:  # of what Python has packed before it was made
            return None
        recorder = self._recorder.of_layer(self._planned.record.layer(number))
        try:
            record = session.record(storage, tensor.dtype, self._codec, recorder)
            record.proof = SnapshotProof.of_base(tensor, tensor._version)
            use = self._step.first_use(record)
            session.saved.add_use(use)
            session.send_results([record])
        except DaemonLost as loss:
            if not self._keeps:
                raise lost_in_forward(loss) from loss
            return None
        recorder.saved(nbytes, perf_counter() - began)
        self._planned.costs.stored(thread_time() - worked)
        return use

    def _stay(self, loss: DaemonLost, sizes: Iterable[int]) -> None:
        """Count results of these bytes as kept, where the step goes on without the daemon.

        Raises:
            DaemonLost: it does not.
        """
        if not self._keeps:
            raise lost_in_forward(loss) from loss
        for nbytes in sizes:
            self._recorder.saved(nbytes, 0.0)
            self._recorder.kept(nbytes, "daemon_lost")

    def _recorder_of(self, members: list[_follow.Member]) -> RangeRecorder:
        """Return what counts a range for the layers of what lies in it."""
        if len(members) == 1:
            return self._recorder.of_layer(self._planned.layer_of(members[0][0]))
        recorders = SharedRecorder()
        for position, nbytes, own in members:
            layer = self._planned.layer_of(position)
            recorders.add(self._recorder.of_layer(layer), nbytes, own)
        return recorders

    def _leave(self, kept: _follow.Kept, session: Session) -> None:
        """Have a result leave, unless it was moved already."""
        found = kept.describe()
        if found is None:
            return
        storage, dtype, nbytes, position, version, base, tensor = found
        recorder = self._recorder.of_layer(self._planned.layer_of(position))
        record = session.find(storage, tensor)
        if record is not None:
            recorder.deduplicated(nbytes)
            use = self._step.use(record)
        else:
            began, decision = perf_counter(), self._policy.decide_storage(storage, self._least)
            if isinstance(decision, Keep):
                recorder.skipped(nbytes, decision.reason)
                return
            record = session.record(storage, dtype, self._codec, recorder)
            use = self._step.first_use(record)
            proof = None if base is None else SnapshotProof.of_base(base, version)
            session.stays_in_use(record, proof)
            if proof is not None:
                self.note(record)
            recorder.saved(nbytes, perf_counter() - began)
        session.saved.add_use(use)
        kept.leave(use)
