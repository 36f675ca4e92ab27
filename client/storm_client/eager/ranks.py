"""Lets the ranks of a job agree on the plans of an Offload, through the job's own store.

`planner.agreement` defines what is agreed on, and by whom; this module carries it out. It calls no
collective, since collectives wait for all ranks. Each access to the store runs in a thread of its
own, and the training thread waits for it a few seconds at most. So a lost store delays one step and
fails none. Once a plan is settled, one step in 16 asks the store for one key.

With a single rank none of this runs.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from storm_client.eager.operations import Function
from storm_client.eager.signature import StepSignature
from storm_client.job_store import STORE_SECONDS, are_several, own_connection, within
from storm_client.planner.agreement import (
    Agreement,
    Alone,
    Deciding,
    Limits,
    Moment,
    Query,
    Reporting,
)
from storm_client.planner.search import SKIPPED, Alternative
from storm_client.planner.slowest import Agreed, Figures

if TYPE_CHECKING:
    from storm_client.eager.plan_maker import PlanMaker

__all__ = ["Ranks"]

MAX_TURNS: Final = 16
"""Queries to the store in one step: enough to form a group and to begin a round."""

MAX_UNSHARED: Final = 3
"""Signatures that no other rank had, before later ones are planned without asking. Ranks whose
routers choose different experts have many."""

STEPS_OF_TURN: Final = 4
"""Steps that follow a plan before all ranks go to the next: one with trials, one that is not
counted, and two that are. A decision in between would cost as many again."""

LIMITS = Limits()

_LOGGER = logging.getLogger("storm_client")
_NUMBERS = itertools.count()
"""Numbers the Offloads of a process, which all ranks create in the same order."""


Expect: TypeAlias = "Callable[[StepSignature, StepSignature], None]"
"""Called with a signature for which a plan was agreed on, and the expected signature of the next
steps."""


@dataclass
class _Shared:
    """The state of the agreement for one step signature."""

    signature: weakref.ref[StepSignature]
    agreement: Agreement
    ended: int = 0
    """Steps that were of this signature."""
    agreed: Agreed | None = None
    """Plans that the steps follow one after another."""
    turn: int = 0
    """The index of the plan that they follow now."""
    begun: int = 0
    """The number of ended steps when they began to follow it."""
    steps: list[list[float | None]] = field(default_factory=list)
    """For each plan so far, the seconds of the steps that have followed it."""

    def follow(self, agreed: Agreed) -> None:
        """Have steps follow what was agreed on, beginning with its first plan."""
        self.agreed, self.turn, self.begun, self.steps = agreed, 0, self.ended, [[]]

    def follow_next(self) -> Agreed | None:
        """Go on to the next plan and return the agreed plans; None if the next is not due."""
        agreed = self.agreed
        if agreed is None or self.turn + 1 >= len(agreed.turns):
            return None
        if self.ended - self.begun < STEPS_OF_TURN:
            return None
        self.turn, self.begun, self.steps = self.turn + 1, self.ended, [*self.steps, []]
        return agreed

    @property
    def followed(self) -> list[Alternative]:
        """The plans that steps have followed since the latest decision."""
        turns = () if self.agreed is None else self.agreed.turns[: self.turn + 1]
        return [alternative for alternative, _ in turns]

    def record_time(self, alternative: Alternative, seconds: float | None) -> bool:
        """Record a step's time; return True once, when enough steps have followed the last plan."""
        agreed, followed = self.agreed, self.followed
        if agreed is None or alternative not in followed:
            return False
        turn = followed.index(alternative)
        self.steps[turn].append(seconds)
        return turn + 1 == len(agreed.turns) and len(self.steps[turn]) == SKIPPED + 2


class Ranks:
    """The ranks that train with one Offload, as one of them sees them."""

    def __init__(self, options: Iterable[object], functions: Iterable[Function]) -> None:
        """Start without knowing other ranks.

        Ranks share plans only if they have the same `options` and may recompute the same
        `functions`.
        """
        self._options = repr([*options, *sorted(map(_name, functions))])
        self._number = next(_NUMBERS)
        self._joined = 0
        """Signatures joined so far: ranks that train together learn them in the same order."""
        self._shared: dict[int, _Shared] = {}
        """By the signature's id. A WeakKeyDictionary would lose an interrupt in its callback."""
        self._begun = 0
        """Steps of any signature."""
        self._store: Any = None
        self._group: weakref.ref[Any] | None = None
        """The process group whose ranks plan together; held weakly, so that it can be destroyed."""
        self._unshared = 0
        """Signatures that no other rank had; at least `MAX_UNSHARED` once ranks did not answer."""
        self._lock = threading.Lock()
        """Held while a thread works on an agreement; other threads go on with their plans."""

    @property
    def are_sharing(self) -> bool:
        """Whether any plan is, or was, agreed on with other ranks."""
        return bool(self._shared)

    def shares(self, signature: StepSignature) -> bool:
        """Return whether other ranks take part in planning a signature."""
        shared = self._of(signature.root)
        return shared is not None and not isinstance(shared.agreement.phase, Alone)

    def ended(self, signature: StepSignature) -> None:
        """Record that a step was of a signature; join an agreement for a newly learned one."""
        root = signature.root
        if root.is_learned and root.followed is None and self._of(root) is None:
            self._join(root)
        shared = self._of(root)
        if shared is not None:
            shared.ended += 1

    def record_times(
        self, signature: StepSignature, steps: Iterable[tuple[Alternative, float | None]]
    ) -> None:
        """Record the times of a signature's latest steps, and call for other plans if due.

        A smaller step than the compared ones has the time None.
        """
        root = signature.root
        shared, comparison = self._of(root), root.comparison
        if shared is None or comparison is None:
            return
        search = comparison.search
        for alternative, seconds in steps:
            if search.is_settled:
                if shared.agreement.leads:
                    search.record_step(search.current, seconds)
                    if not search.is_settled:
                        root.outdate()
            elif shared.record_time(alternative, seconds):
                root.outdate()

    def agree(self, maker: PlanMaker, expect: Expect) -> None:
        """Continue all agreements, as a step begins.

        Raises:
            UsageError: the budget cannot be kept.
        """
        self._begun += 1
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._has_left_group():
                self._join_anew()
            for key, shared in list(self._shared.items()):
                root = shared.signature()
                if root is None:
                    del self._shared[key]
                elif not isinstance(shared.agreement.phase, Alone):
                    self._agree_on(root, shared, maker, expect)
        finally:
            self._lock.release()

    # --- helpers ----------------------------------------------------------------------------

    def _of(self, root: StepSignature) -> _Shared | None:
        shared = self._shared.get(id(root))
        return shared if shared is not None and shared.signature() is root else None

    def _now(self) -> Moment:
        return Moment(self._begun, monotonic())

    def _join(self, signature: StepSignature) -> None:
        """Join an agreement on the plan of a signature, unless this rank plans alone."""
        if self._unshared >= MAX_UNSHARED or not are_several():
            return
        self._group = weakref.ref(_all_ranks())
        self._shared[id(signature)] = _Shared(
            weakref.ref(signature),
            Agreement(
                torch.distributed.get_rank(),
                torch.distributed.get_world_size(),
                _digest(signature, self._options),
                prefix=f"storm/{self._number}/{self._joined}",
                now=self._now(),
                limits=LIMITS,
            ),
        )
        self._joined += 1

    def _has_left_group(self) -> bool:
        """Return whether the process group whose ranks planned together was destroyed."""
        group = None if self._group is None else self._group()
        return self._group is not None and (group is None or group is not _all_ranks())

    def _join_anew(self) -> None:
        """Plan with the ranks of the new process group, or alone if there is none.

        All ranks of a new group come here as they begin their next step.
        """
        before, self._shared = list(self._shared.values()), {}
        self._store, self._group, self._unshared = None, None, 0
        for shared in before:
            root = shared.signature()
            if root is not None:
                root.outdate()
                self._join(root)

    def _agree_on(
        self, signature: StepSignature, shared: _Shared, maker: PlanMaker, expect: Expect
    ) -> None:
        agreement = shared.agreement
        agreement.tick(self._now())
        if signature.is_outdated:
            agreement.start_round()
        for _ in range(MAX_TURNS):
            if not self._take_turn(signature, shared, maker):
                break
        if isinstance(agreement.phase, Alone):
            signature.outdate()
            self._unshared += MAX_UNSHARED if agreement.phase.reason else 1
            self._say(agreement.phase)
            return
        agreed, choice = shared.follow_next(), agreement.due(shared.ended)
        if choice is not None:
            shared.follow(agreed := Agreed.from_text(choice))
            agreement.follow(shared.ended)
        if agreed is not None:
            leads = agreement.leads
            expect(signature, maker.follow_agreed(signature, agreed, shared.turn, leads=leads))

    def _take_turn(self, signature: StepSignature, shared: _Shared, maker: PlanMaker) -> bool:
        """Do the next action of an agreement; return whether another may follow in this step."""
        agreement, step, now = shared.agreement, shared.ended, self._now()
        phase = agreement.phase
        if isinstance(phase, Reporting):
            agreement.report(maker.figures(signature, shared.steps).to_text(), step, now)
        elif isinstance(phase, Deciding):
            slowest = Figures.slowest([Figures.from_text(text) for text in phase.reports])
            agreement.decide(maker.decide(signature, slowest, shared.followed).to_text(), step)
        else:
            queries = agreement.queries(step, now)
            if not queries and not agreement.outbox:
                return False
            try:
                found = within(STORE_SECONDS, lambda: self._exchange(agreement, queries))
            except Exception as error:  # noqa: BLE001 - no step may fail of it
                agreement.fail(f"the job's store has failed: {error or type(error).__name__}")
                return False
            if found is None:
                return False
            agreement.receive(found, step, now)
        return True

    def _exchange(self, agreement: Agreement, queries: Sequence[Query]) -> dict[str, str] | None:
        """Write the outbox to the store; return what the first successful query finds, if any."""
        store = self._store
        if store is None:
            store = self._store = own_connection()
        while agreement.outbox:
            key, value, is_claim = agreement.outbox[0]
            if is_claim:
                store.compare_set(key, "", value)
            else:
                store.set(key, value)
            agreement.outbox.popleft()
        for needed, optional in queries:
            if needed and not store.check(list(needed)):
                continue
            keys = [*needed, *(key for key in optional if store.check([key]))]
            return {key: store.get(key).decode() for key in keys}
        return None

    def _say(self, phase: Alone) -> None:
        if phase.reason:
            _LOGGER.warning(
                "stormd: rank %d plans for itself from now on, so ranks may wait for each other: "
                "%s. Its results are the same.",
                torch.distributed.get_rank() if are_several() else 0,
                phase.reason,
            )


def _all_ranks() -> Any:
    """Return the process group of all ranks; None if this process is not one of several."""
    return torch.distributed.group.WORLD if are_several() else None


def _digest(signature: StepSignature, options: str) -> str:
    """Return a digest that is equal for ranks whose steps can follow the same plan."""
    hashed = hashlib.sha256(options.encode())
    for what, *rest in signature.events:
        hashed.update(f"{_name(what)} {rest}\n".encode())
    for value in signature.values:
        described = value.dtype, value.device.type, value.operation, value.uses
        hashed.update(f"{described} {value.is_result}\n".encode())
    return hashed.hexdigest()[:16]


def _name(what: Any) -> str:
    """Return the name of a function, which is the same in every process."""
    if isinstance(what, str):
        return what
    name = getattr(what, "__qualname__", getattr(what, "__name__", type(what).__name__))
    return f"{getattr(what, '__module__', '')}.{name}"
