"""Makes ranks that train one model follow the same plan, from the same step on.

In each layer of a data-parallel model all ranks wait for the slowest. So ranks whose steps have the
same signature form a group, and its lowest rank, the leader, makes the plans of all:

1. Each rank writes the digest of its step signature. The lowest of the ranks with equal digests
   claims to lead them.
2. In a round, each rank reports its figures. The leader makes a plan from the slowest figures. It
   writes the plan and the first step that follows it.
3. A rank that learns something new calls for the next round. The others look for a call at
   intervals.

A rank that sees a decision too late does not follow it, and calls for another one with more time.
A rank that waits past a deadline writes that the group has ended: then each rank plans alone. A
rank that joins late follows a decision as soon as it sees the decision: it cannot know the others'
step count.

This is a state machine without a store, clock or plan. It returns the keys to look for in a store,
and its caller passes the values found. All keys but `latest` are written once, or always with the
same value.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

__all__ = ["Agreement", "Alone", "Deciding", "Limits", "Moment", "Put", "Query", "Reporting"]

MARGIN: Final = 2
"""Steps from the latest step that a rank has reported to the first that follows a decision."""

MAX_MARGIN: Final = 32
"""The margin doubles with each decision that a rank has seen too late, up to this limit."""

NEAR: Final = 8
"""Steps after a decision in which each looks for a call; later only every `RARELY`th does."""

RARELY: Final = 16


class Limits(NamedTuple):
    """How long a rank waits for others. Both the steps and the seconds have to pass."""

    seconds: float = 10.0
    steps: int = 40
    """For a report or a decision."""
    forming_steps: int = 8
    """For other ranks to show which steps they run."""


class Moment(NamedTuple):
    """A point in time: this rank's count of steps of any signature, and its clock."""

    step: int
    seconds: float


class Put(NamedTuple):
    """A value to be written to the store."""

    key: str
    value: str
    is_claim: bool = False
    """Whether it is written only if the key has no value."""


class Query(NamedTuple):
    """Keys to look for: the query fails unless all `needed` keys have a value."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Keys that are also read if they have a value."""


@dataclass(frozen=True, slots=True)
class Forming:
    """The ranks that run the same steps are not known yet."""

    since: Moment
    is_known: bool = False
    """Whether they are known, and only the leader's claim is missing."""


@dataclass(frozen=True, slots=True)
class Joining:
    """The group was formed without this rank, which looks for the latest decision."""

    since: Moment


@dataclass(frozen=True, slots=True)
class Reporting:
    """The rank has to report its figures."""

    round: int
    has_missed: bool = False
    """Whether it saw the previous decision too late."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The rank waits for the leader's decision."""

    round: int
    since: Moment


@dataclass(frozen=True, slots=True)
class Gathering:
    """The rank leads, and waits for other ranks' reports."""

    round: int
    since: Moment


@dataclass(frozen=True, slots=True)
class Deciding:
    """All ranks have reported; this one leads, and has to make the plan."""

    round: int
    reports: tuple[str, ...]
    last_step: int
    """The latest step that any of the ranks had reached."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision is known. This rank follows it when it reaches the decision's step."""

    round: int
    step: int
    choice: str


@dataclass(frozen=True, slots=True)
class Following:
    """The rank follows the latest decision."""

    round: int
    step: int
    """The first step that followed it."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The rank plans without the others from now on."""

    reason: str
    """For the user; empty if there is nothing to report, as when no other rank runs such steps."""


Phase: TypeAlias = (
    Forming | Joining | Reporting | Waiting | Gathering | Deciding | Decided | Following | Alone
)


class Agreement:
    """One rank's part in the agreement, for one step signature.

    Steps are counted per signature: ranks that train together have completed the same number.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        digest: str,
        *,
        prefix: str,
        now: Moment,
        limits: Limits | None = None,
    ) -> None:
        """Begin as `rank` of `world`, whose step signature has the digest `digest`.

        All keys begin with `prefix`. Ranks that may run the same steps have the same prefix.
        """
        self.rank = rank
        self._world = world
        self._digest = digest
        self._limits = limits or Limits()
        self._firsts = tuple(f"{prefix}/first/{other}" for other in range(world))
        self._group = f"{prefix}/{digest}"
        self.members: tuple[int, ...] = ()
        """The ranks of the group, in order; empty until the group is formed."""
        self._leader = -1
        self._absent: tuple[int, ...] = ()
        """Ranks that had not shown their digest when the group was formed."""
        self._margin = MARGIN
        self.phase: Phase = Forming(now)
        """Changes by one assignment, so that an interrupt leaves the previous phase."""
        self.outbox: deque[Put] = deque([Put(self._firsts[rank], digest)])
        """Values to be written; each is removed once it was written."""

        # --- called by the owner of the store ----------------------------------------------------

    def tick(self, now: Moment) -> None:
        """Let this rank go on alone if it has waited past its deadline."""
        phase = self.phase
        if isinstance(phase, Forming):
            if phase.is_known and self._is_overdue(phase.since, now, self._limits.steps):
                self.leave_group("no rank has claimed to plan for the others")
        elif isinstance(phase, Joining | Waiting | Gathering) and self._is_overdue(
            phase.since, now, self._limits.steps
        ):
            missing = "the other ranks' figures" if isinstance(phase, Gathering) else "a decision"
            self.leave_group(f"{missing} did not come within {self._limits.seconds:g} s")

    def queries(self, step: int, now: Moment) -> list[Query]:
        """Return queries, to be tried in this order until one succeeds; mostly none."""
        phase = self.phase
        over = Query((self._key("over"),))
        match phase:
            case Forming():
                return [over, *self._forming_queries(phase, now)]
            case Joining():
                return [over, Query((self._key("latest"),))]
            case Gathering():
                reports = (self._report_key(phase.round, rank) for rank in self.members)
                others = (self._report_key(phase.round, rank) for rank in self._absent)
                return [over, Query(tuple(reports), tuple(others))]
            case Waiting():
                return [over, Query((self._key(f"{phase.round}/decision"),))]
            case Following() if step - phase.step < NEAR or step % RARELY == 0:
                return [Query((self._key(f"{phase.round + 1}/call"),))]
        return []

    def receive(self, values: Mapping[str, str], step: int, now: Moment) -> None:
        """Continue with the values that a query has found."""
        phase = self.phase
        if self._key("over") in values:
            self.phase = Alone(f"rank {values[self._key('over')]}")
            return
        match phase:
            case Forming() if self._key("leader") in values:
                self._record_leader(values[self._key("leader")], now)
            case Forming():
                self._record_ranks(values, now)
            case Joining():
                self.phase = Waiting(int(values[self._key("latest")]), now)
            case Gathering():
                self._record_reports(phase, values, step)
            case Waiting():
                self._record_decision(phase, values, step)
            case Following():
                self.phase = Reporting(phase.round + 1)

    def report(self, figures: str, step: int, now: Moment) -> None:
        """Report this rank's figures; in the phase `Reporting`."""
        phase = self.phase
        assert isinstance(phase, Reporting)
        said = {
            "step": step if self._is_aligned else 0,
            "has_missed": phase.has_missed,
            "figures": figures,
        }
        self.outbox.append(Put(self._report_key(phase.round, self.rank), json.dumps(said)))
        self.outbox.append(Put(self._key(f"{phase.round}/call"), "1"))
        following = Gathering if self.leads else Waiting
        self.phase = following(phase.round, now)

    def decide(self, choice: str, step: int) -> None:
        """Publish the choice that all ranks follow; in the phase `Deciding`."""
        phase = self.phase
        assert isinstance(phase, Deciding)
        first = max(phase.last_step, step) + self._margin
        said = json.dumps({"step": first, "choice": choice})
        self.outbox.append(Put(self._key(f"{phase.round}/decision"), said))
        self.outbox.append(Put(self._key("latest"), str(phase.round)))
        self.phase = Decided(phase.round, first, choice)

    def due(self, step: int) -> str | None:
        """Return the choice that this step is the first to follow; None if nothing changes.

        The caller confirms with `follow`.
        """
        phase = self.phase
        if not isinstance(phase, Decided) or (self._is_aligned and step < phase.step):
            return None
        if self._is_aligned and step > phase.step:
            self.phase = Reporting(phase.round + 1, has_missed=True)
            return None
        return phase.choice

    def follow(self, step: int) -> None:
        """Note that this rank follows the decision that was due."""
        phase = self.phase
        assert isinstance(phase, Decided)
        self.phase = Following(phase.round, step)

    def start_round(self) -> bool:
        """Begin a round, since this rank learned something new; return whether a round begins."""
        phase = self.phase
        if not isinstance(phase, Following):
            return False
        self.phase = Reporting(phase.round + 1)
        return True

    def leave_group(self, reason: str) -> None:
        """Go on alone, and make the other ranks of the group do so, too."""
        self.outbox.append(Put(self._key("over"), f"{self.rank}: {reason}", is_claim=True))
        at = getattr(self.phase, "round", None)
        if at is not None:
            self.outbox.extend(Put(self._key(f"{n}/call"), "1") for n in (at, at + 1))
        self.phase = Alone(reason)

    def fail(self, reason: str) -> None:
        """Go on alone without informing the others: the store has failed."""
        self.outbox.clear()
        self.phase = Alone(reason)

    @property
    def leads(self) -> bool:
        """Whether this rank makes the plans of its group."""
        return self.rank == self._leader

    def assert_invariants(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        led = isinstance(self.phase, Gathering | Deciding)
        assert not led or (self.leads and self.rank in self.members)
        assert not isinstance(self.phase, Forming) or not self.members
        assert not set(self.members) & set(self._absent)
        assert MARGIN <= self._margin <= 2 * MAX_MARGIN

    # --- helpers ----------------------------------------------------------------------------

    @property
    def _is_aligned(self) -> bool:
        """Whether this rank counts the same steps as the leader."""
        return self.rank in self.members

    def _key(self, name: str) -> str:
        return f"{self._group}/{name}"

    def _report_key(self, number: int, rank: int) -> str:
        return self._key(f"{number}/report/{rank}")

    def _is_overdue(self, since: Moment, now: Moment, steps: int) -> bool:
        is_late = now.seconds - since.seconds >= self._limits.seconds
        return is_late and now.step - since.step >= steps

    def _forming_queries(self, phase: Forming, now: Moment) -> list[Query]:
        queries = [Query((self._key("leader"),))]
        if not phase.is_known:
            queries.append(Query(self._firsts))
            if self._is_overdue(phase.since, now, self._limits.forming_steps):
                queries.append(Query((), self._firsts))
        return queries

    def _record_ranks(self, values: Mapping[str, str], now: Moment) -> None:
        seen = {rank: values[key] for rank, key in enumerate(self._firsts) if key in values}
        same = sorted({self.rank, *(r for r, digest in seen.items() if digest == self._digest)})
        absent = [rank for rank in range(self._world) if rank not in seen and rank != self.rank]
        if len(same) == 1 and absent:
            self.leave_group(f"ranks {absent} have not shown which steps they run")
            return
        if len(same) == 1:
            self.phase = Alone("")
            return
        if same[0] == self.rank:
            said = json.dumps({"leader": self.rank, "members": same, "absent": absent})
            self.outbox.append(Put(self._key("leader"), said, is_claim=True))
        self.phase = Forming(now, is_known=True)

    def _record_leader(self, said: str, now: Moment) -> None:
        claim = json.loads(said)
        self._leader, self.members = claim["leader"], tuple(claim["members"])
        self._absent = tuple(claim["absent"])
        self.phase = Reporting(0) if self._is_aligned else Joining(now)

    def _record_reports(self, phase: Gathering, values: Mapping[str, str], step: int) -> None:
        reports = [json.loads(values[key]) for key in sorted(values)]
        if any(report["has_missed"] for report in reports):
            self._margin *= 2
        if self._margin > MAX_MARGIN:
            self.leave_group("decisions were seen too late again and again")
            return
        last = max([step, *(report["step"] for report in reports)])
        figures = tuple(report["figures"] for report in reports)
        self.phase = Deciding(phase.round, figures, last)

    def _record_decision(self, phase: Waiting, values: Mapping[str, str], step: int) -> None:
        said = json.loads(values[self._key(f"{phase.round}/decision")])
        if self._is_aligned and step > said["step"]:
            self.phase = Reporting(phase.round + 1, has_missed=True)
        else:
            self.phase = Decided(phase.round, said["step"], said["choice"])
