"""Has the plans of an Offload be agreed on by the ranks of a job, by the job's own store.

What is agreed on, and by whom, says `planner.agreement`; this performs it. It calls no collective:
those wait for all ranks. Each access to the store runs in a thread of its own, for which the
training thread waits a few seconds at the most, so that a store that is gone delays one step and
fails none. Once a plan is settled one step in 16 asks the store for one key.

Where there is one rank, nothing of this runs.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch

from storm_client.eager.operations import Function
from storm_client.eager.signature import StepSignature
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

STORE_SECONDS: Final = 5.0
"""For which a step waits for the store at the most."""

MOST_TURNS: Final = 16
"""Questions to the store in one step: enough to form a group and to begin a round."""

MOST_LONELY: Final = 3
"""Signatures that no other rank had, until later ones are planned without asking: ranks whose
routers choose experts of their own have many."""

STEPS_OF_TURN: Final = 4
"""Steps that follow a plan before all ranks go to the next: one that tries what is new, one that is
not counted, and two that are. A decision between would cost as many again."""

LIMITS = Limits()

_LOGGER = logging.getLogger("storm_client")
_NUMBERS = itertools.count()
"""Tells the Offloads of a process apart: ranks make theirs in the same order."""

_Result = TypeVar("_Result")


Expect: TypeAlias = "Callable[[StepSignature, StepSignature], None]"
"""Is told of a signature for which a plan was agreed on, and of the signature that its next steps
will be of."""


@dataclass
class _Shared:
    """What is agreed on for one step signature."""

    agreement: Agreement
    ended: int = 0
    """Steps that were of this signature."""
    agreed: Agreed | None = None
    """Plans that they follow one after another."""
    turn: int = 0
    """Which of these they follow now."""
    begun: int = 0
    """How many steps had ended when they began to."""
    steps: list[list[float | None]] = field(default_factory=list)
    """What those took that have followed each of its plans so far."""

    def follow(self, agreed: Agreed) -> None:
        """Have what was agreed on be followed, beginning with its first plan."""
        self.agreed, self.turn, self.begun, self.steps = agreed, 0, self.ended, [[]]

    def follow_next(self) -> Agreed | None:
        """Go on to the next plan where that is due, and return what was agreed on."""
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

    def took(self, alternative: Alternative, seconds: float | None) -> bool:
        """Note what a step took; tell, once, that enough have followed the last of the plans."""
        agreed, followed = self.agreed, self.followed
        if agreed is None or alternative not in followed:
            return False
        turn = followed.index(alternative)
        self.steps[turn].append(seconds)
        return turn + 1 == len(agreed.turns) and len(self.steps[turn]) == SKIPPED + 2


class Ranks:
    """The ranks that train with one Offload, as one of them sees them."""

    def __init__(self, options: Iterable[object], functions: Iterable[Function]) -> None:
        """Begin with nobody known.

        Ranks plan alike only with the same `options`, and if the same `functions` are recomputed.
        """
        self._options = repr([*options, *sorted(map(_name, functions))])
        self._number = next(_NUMBERS)
        self._joined = 0
        """Step signatures so far: ranks that train together learn them in the same order."""
        self._shared: WeakKeyDictionary[StepSignature, _Shared] = WeakKeyDictionary()
        self._begun = 0
        """Steps of any signature."""
        self._store: Any = None
        self._lonely = 0
        """Signatures that no other rank had, or whose ranks did not answer."""
        self._lock = threading.Lock()
        """Held while a thread agrees; others go on with what they follow."""

    @property
    def are_sharing(self) -> bool:
        """Whether there is a plan that others have a say in, or have had."""
        return bool(self._shared)

    def shares(self, signature: StepSignature) -> bool:
        """Tell whether others have a say in the plan of a signature."""
        shared = self._shared.get(signature.root)
        return shared is not None and not isinstance(shared.agreement.phase, Alone)

    def ended(self, signature: StepSignature) -> None:
        """Note that a step was of a signature. Ranks agree on the plan of a new one."""
        root = signature.root
        if root.is_learned and root.followed is None and root not in self._shared:
            self._join(root)
        shared = self._shared.get(root)
        if shared is not None:
            shared.ended += 1

    def took(
        self, signature: StepSignature, steps: Iterable[tuple[Alternative, float | None]]
    ) -> None:
        """Note what the latest steps of a signature took, and call for other plans if due.

        None is what a step took that is smaller than others.
        """
        root = signature.root
        shared, comparison = self._shared.get(root), root.comparison
        if shared is None or comparison is None:
            return
        search = comparison.search
        for alternative, seconds in steps:
            if search.is_settled:
                if shared.agreement.leads:
                    search.took(search.current, seconds)
                    if not search.is_settled:
                        root.outdate()
            elif shared.took(alternative, seconds):
                root.outdate()

    def agree(self, maker: PlanMaker, expect: Expect) -> None:
        """Go on with what is being agreed on, as a step begins.

        Raises:
            UsageError: the budget cannot be kept.
        """
        self._begun += 1
        if not self._lock.acquire(blocking=False):
            return
        try:
            for root, shared in list(self._shared.items()):
                if not isinstance(shared.agreement.phase, Alone):
                    self._agree_on(root, shared, maker, expect)
        finally:
            self._lock.release()

    # --- helpers ----------------------------------------------------------------------------

    def _now(self) -> Moment:
        return Moment(self._begun, monotonic())

    def _join(self, signature: StepSignature) -> None:
        """Have the plan of a signature agreed on, unless this rank has no others."""
        if self._lonely >= MOST_LONELY or not _are_several():
            return
        shared = _Shared(
            Agreement(
                torch.distributed.get_rank(),
                torch.distributed.get_world_size(),
                _digest(signature, self._options),
                prefix=f"storm/{self._number}/{self._joined}",
                now=self._now(),
                limits=LIMITS,
            )
        )
        self._joined += 1
        self._shared[signature] = shared

    def _agree_on(
        self, signature: StepSignature, shared: _Shared, maker: PlanMaker, expect: Expect
    ) -> None:
        agreement = shared.agreement
        agreement.tick(self._now())
        if signature.is_outdated:
            agreement.call()
        for _ in range(MOST_TURNS):
            if not self._take_turn(signature, shared, maker):
                break
        if isinstance(agreement.phase, Alone):
            signature.outdate()
            self._lonely += MOST_LONELY if agreement.phase.reason else 1
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
        """Do what comes next; tell whether something may come behind it in this step."""
        agreement, step, now = shared.agreement, shared.ended, self._now()
        phase = agreement.phase
        if isinstance(phase, Reporting):
            agreement.report(maker.figures(signature, shared.steps).to_text(), step, now)
        elif isinstance(phase, Deciding):
            slowest = Figures.slowest([Figures.from_text(text) for text in phase.reports])
            agreement.decide(maker.decide(signature, slowest, shared.followed).to_text(), step)
        else:
            queries = agreement.asks(step, now)
            if not queries and not agreement.outbox:
                return False
            try:
                found = _within(STORE_SECONDS, lambda: self._exchange(agreement, queries))
            except Exception as error:  # noqa: BLE001 - no step may fail of it
                agreement.fail(f"the job's store has failed: {error or type(error).__name__}")
                return False
            if found is None:
                return False
            agreement.found(found, step, now)
        return True

    def _exchange(self, agreement: Agreement, queries: Sequence[Query]) -> dict[str, str] | None:
        """Write what is to be written; return what the first query finds that finds something."""
        store = self._store
        if store is None:
            store = self._store = _job_store()
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
                torch.distributed.get_rank() if _are_several() else 0,
                phase.reason,
            )


def _are_several() -> bool:
    """Tell whether this process is one of several ranks."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _job_store() -> Any:
    """Return a connection of our own to the job's store: no call waits for one of another's."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Return what a function returns, or raise what it raises, within some time.

    Raises:
        TimeoutError: it has not; it goes on in a thread that nobody waits for.
    """
    done: list[_Result] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(function())
        except Exception as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="storm-ranks", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return done[0]


def _digest(signature: StepSignature, options: str) -> str:
    """Return what two ranks have in common whose steps can follow the same plan."""
    hashed = hashlib.sha256(options.encode())
    for what, *rest in signature.events:
        hashed.update(f"{_name(what)} {rest}\n".encode())
    for value in signature.values:
        told = value.dtype, value.device.type, value.operation, value.uses
        hashed.update(f"{told} {value.is_result}\n".encode())
    return hashed.hexdigest()[:16]


def _name(what: Any) -> str:
    """Return the name of a function, which is the same in every process."""
    if isinstance(what, str):
        return what
    name = getattr(what, "__qualname__", getattr(what, "__name__", type(what).__name__))
    return f"{getattr(what, '__module__', '')}.{name}"
