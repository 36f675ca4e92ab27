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
from time import monotonic
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from storm_client.eager.operations import Function
from storm_client.eager.signature import Kind
from storm_client.planner.agreement import (
    Agreement,
    Alone,
    Deciding,
    Limits,
    Moment,
    Query,
    Reporting,
)
from storm_client.planner.search import MEASURED, SKIPPED, Alternative
from storm_client.planner.slowest import Agreed, Figures

__all__ = ["Planner", "Ranks"]

STORE_SECONDS: Final = 5.0
"""For which a step waits for the store at the most."""

MOST_TURNS: Final = 16
"""Questions to the store in one step: enough to form a group and to begin a round."""

MOST_LONELY: Final = 3
"""Signatures that no other rank had, until later ones are planned without asking: ranks whose
routers choose experts of their own have many."""

LIMITS = Limits()

_LOGGER = logging.getLogger("storm_client")
_NUMBERS = itertools.count()
"""Tells the Offloads of a process apart: ranks make theirs in the same order."""

_Result = TypeVar("_Result")


class Planner(Protocol):
    """Who makes plans of what is agreed on, and has steps follow them."""

    def figures(self, kind: Kind, steps: Sequence[float | None]) -> Figures:
        """Return what is known of a kind, of which the latest `steps` took so many seconds."""
        ...

    def decide(self, kind: Kind, slowest: Figures, followed: Alternative | None) -> Agreed:
        """Return what the next steps are to follow; those of the figures have `followed` that."""
        ...

    def follow_agreed(self, kind: Kind, agreed: Agreed, *, leads: bool) -> None:
        """Have the next step of a kind follow what was agreed on; `leads` if this rank chose it."""
        ...


class _Shared:
    """What is agreed on for one step signature."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.ended = 0
        """Steps that were of this signature."""
        self.followed: Alternative | None = None
        """What they follow."""
        self.steps: list[float | None] = []
        """What those took."""


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
        self._shared: WeakKeyDictionary[Kind, _Shared] = WeakKeyDictionary()
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

    def shares(self, kind: Kind) -> bool:
        """Tell whether others have a say in the plan of a kind."""
        shared = self._shared.get(kind.origin or kind)
        return shared is not None and not isinstance(shared.agreement.phase, Alone)

    def ended(self, kind: Kind) -> None:
        """Note that a step was of a kind. The plan of a new one is agreed on with other ranks."""
        root = kind.origin or kind
        if root.is_learned and not root.is_planned and root not in self._shared:
            self._join(root)
        shared = self._shared.get(root)
        if shared is not None:
            shared.ended += 1

    def took(self, kind: Kind, seconds: Sequence[float | None]) -> None:
        """Note what the latest steps of a kind took, and call for another plan once that is due.

        None is what a step took that is smaller than others.
        """
        root = kind.origin or kind
        shared, search = self._shared.get(root), root.search
        if shared is None or search is None or not seconds:
            return
        if not search.is_settled:
            shared.steps += seconds
            if len(shared.steps) >= SKIPPED + MEASURED:
                root.is_outdated = True
        elif shared.agreement.leads:
            for one in seconds:
                search.took(search.current, one)
            root.is_outdated |= not search.is_settled

    def agree(self, planner: Planner, news: Iterable[Kind]) -> None:
        """Go on with what is being agreed on, as a step begins; `news` are kinds to be planned."""
        self._begun += 1
        if not self._lock.acquire(blocking=False):
            return
        try:
            for kind in news:
                root = kind.origin or kind
                if root is not kind and self.shares(root):
                    kind.is_outdated, root.is_outdated = False, True
            for root, shared in list(self._shared.items()):
                if not isinstance(shared.agreement.phase, Alone):
                    self._agree_on(root, shared, planner)
        finally:
            self._lock.release()

    # --- helpers ----------------------------------------------------------------------------

    def _now(self) -> Moment:
        return Moment(self._begun, monotonic())

    def _join(self, kind: Kind) -> None:
        """Have the plan of a kind agreed on, unless this rank has no others."""
        if self._lonely >= MOST_LONELY or not _are_several():
            return
        shared = _Shared(
            Agreement(
                torch.distributed.get_rank(),
                torch.distributed.get_world_size(),
                _digest(kind, self._options),
                prefix=f"storm/{self._number}/{self._joined}",
                now=self._now(),
                limits=LIMITS,
            )
        )
        self._joined += 1
        self._shared[kind] = shared

    def _agree_on(self, kind: Kind, shared: _Shared, planner: Planner) -> None:
        agreement = shared.agreement
        agreement.tick(self._now())
        if kind.is_outdated:
            agreement.call()
        for _ in range(MOST_TURNS):
            if not self._take_turn(kind, shared, planner):
                break
        if isinstance(agreement.phase, Alone):
            kind.is_outdated = True
            self._lonely += MOST_LONELY if agreement.phase.reason else 1
            self._say(agreement.phase)
            return
        choice = agreement.due(shared.ended)
        if choice is not None:
            agreed = Agreed.from_text(choice)
            planner.follow_agreed(kind, agreed, leads=agreement.leads)
            shared.followed = None if agreed.search is None else agreed.search.current
            shared.steps = []
            agreement.follow(shared.ended)

    def _take_turn(self, kind: Kind, shared: _Shared, planner: Planner) -> bool:
        """Do what comes next; tell whether something may come behind it in this step."""
        agreement, step, now = shared.agreement, shared.ended, self._now()
        phase = agreement.phase
        if isinstance(phase, Reporting):
            agreement.report(planner.figures(kind, shared.steps).to_text(), step, now)
        elif isinstance(phase, Deciding):
            slowest = Figures.slowest([Figures.from_text(text) for text in phase.reports])
            agreement.decide(planner.decide(kind, slowest, shared.followed).to_text(), step)
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


def _digest(kind: Kind, options: str) -> str:
    """Return what two ranks have in common whose steps can follow the same plan."""
    hashed = hashlib.sha256(f"{options} {kind.functions}".encode())
    for what, *rest in kind.events:
        hashed.update(f"{_name(what)} {rest}\n".encode())
    for value in kind.values:
        told = value.dtype, value.device.type, value.operation, value.uses
        hashed.update(f"{told} {value.is_result}\n".encode())
    return hashed.hexdigest()[:16]


def _name(what: Any) -> str:
    """Return the name of a function, which is the same in every process."""
    if isinstance(what, str):
        return what
    name = getattr(what, "__qualname__", getattr(what, "__name__", type(what).__name__))
    return f"{getattr(what, '__module__', '')}.{name}"
