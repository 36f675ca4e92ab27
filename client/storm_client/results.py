"""How results of operations are offloaded: their changes are counted even if somebody holds them.

Compiled code keeps results temporarily, and offloads several at once if nobody else holds them. All
results are offloaded at the end of their block at the latest.
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
    from storm_client.eager.planned_step import PlannedStep
    from storm_client.monitoring.stats import StatsRecorder
    from storm_client.native import _follow
    from storm_client.policy import Policy
    from storm_client.transport.session import Session

__all__ = ["Results"]


class Results:
    """The results of one step."""

    def __init__(
        self,
        planned: PlannedStep,
        step: Step,
        policy: Policy,
        recorder: StatsRecorder,
        *,
        min_bytes: int,
        codec: str,
        keeps_without_daemon: bool,
    ) -> None:
        """Start without results. Results below `min_bytes` bytes are kept.

        `keeps_without_daemon` says whether the step continues without a lost daemon.
        """
        self.session: Session | None = None
        """The session for results that compiled code keeps temporarily."""
        self._planned = planned
        self._step = step
        self._policy = policy
        self._min_bytes = min_bytes
        self._codec = codec
        self._recorder = recorder
        self._keeps_without_daemon = keeps_without_daemon
        self._records: list[weakref.ref[StoredRange]] = []
        """Records that are sent at the end of the block at the latest."""

    def send_at_end(self, record: StoredRange) -> None:
        """Send the record of a result at the end of the block at the latest."""
        self._records.append(weakref.ref(record))

    def send(self) -> None:
        """Send all records that have not been sent.

        Raises:
            DaemonLost: a daemon is gone. The client keeps all that the daemon has not admitted.
        """
        records = [record for reference in self._records if (record := reference()) is not None]
        self._records.clear()
        for record in records:
            if record.phase is RangePhase.IN_USE:
                record.session.send(record)

    @untraced
    def offload_waiting(self, kept: list[_follow.Kept]) -> None:
        """Offload results that compiled code has kept so far; after an error the rest is kept."""
        session = self.session
        assert session is not None, "what is kept for now is of its device"
        try:
            with session.connection.lock:
                for one in kept:
                    self._offload(one, session)
            session.send_unshared(latest=len(kept) + LOOK_BACK)
        except DaemonLost as loss:
            left = filter(None, (one.describe() for one in kept))
            self._keep_after_loss(loss, (nbytes for _, _, nbytes, *_ in left))

    @untraced
    def offload_unshared(self, units: list[_follow.Unit]) -> list[Use] | None:
        """Offload results, one range per unit; return None if they are to be kept.

        Nobody else holds the results or their copies, so nobody can find them or write to them.
        """
        session, began, worked = self.session, perf_counter(), thread_time()
        assert session is not None, "what is kept for now is of its device"
        records, uses = [], []
        try:
            for storage, dtype, members in units:
                record = session.new_record(storage, dtype, self._codec, self._recorder_of(members))
                records.append(record)
                uses.append(use := self._step.first_use(record))
                session.saved.add_use(use)
            session.send_results(records)
        except DaemonLost as loss:
            members_of_all = chain.from_iterable(members for _, _, members in units)
            self._keep_after_loss(loss, (nbytes for _, nbytes, _ in members_of_all))
            return None
        seconds = perf_counter() - began
        if session.has_in_place:  # otherwise the thread copies, and costs are counted by bytes
            self._planned.costs.stored((thread_time() - worked) / len(units))
        for record, (_, _, members) in zip(records, units, strict=True):
            record.stats.saved(members[0][1], seconds)
            seconds = 0.0
        return uses

    def _keep_after_loss(self, loss: DaemonLost, sizes: Iterable[int]) -> None:
        """Count results of these sizes, in bytes, as kept because the daemon is lost.

        Raises:
            DaemonLost: the step does not continue without a daemon.
        """
        if not self._keeps_without_daemon:
            raise lost_in_forward(loss) from loss
        for nbytes in sizes:
            self._recorder.saved(nbytes, 0.0)
            self._recorder.kept(nbytes, "daemon_lost")

    def _recorder_of(self, members: list[_follow.Member]) -> RangeRecorder:
        """Return the recorder that counts a range for the layers of its members."""
        if len(members) == 1:
            return self._recorder.of_layer(self._planned.layer(members[0][0]))
        recorders = SharedRecorder()
        for number, nbytes, own in members:
            recorders.add(self._recorder.of_layer(self._planned.layer(number)), nbytes, own)
        return recorders

    def _offload(self, kept: _follow.Kept, session: Session) -> None:
        """Offload a result, unless it was moved already."""
        found = kept.describe()
        if found is None:
            return
        storage, dtype, nbytes, number, version, base, tensor = found
        recorder = self._recorder.of_layer(self._planned.layer(number))
        record = session.find(storage, tensor)
        if record is not None:
            recorder.deduplicated(nbytes)
            use = self._step.use(record)
        else:
            began, decision = perf_counter(), self._policy.decide_storage(storage, self._min_bytes)
            if isinstance(decision, Keep):
                recorder.skipped(nbytes, decision.reason)
                return
            record = session.new_record(storage, dtype, self._codec, recorder)
            use = self._step.first_use(record)
            proof = None if base is None else SnapshotProof.of_base(base, version)
            session.defer_until_unshared(record, proof)
            if proof is not None:
                self.send_at_end(record)
            recorder.saved(nbytes, perf_counter() - began)
        session.saved.add_use(use)
        kept.release(use)
