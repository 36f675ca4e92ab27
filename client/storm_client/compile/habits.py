"""What a compiled graph stores in a session whenever it runs, learned from its runs.

Which values leave is the plan's choice, but which of them are another's storage, or are kept for
the budget's sake, shows only in a run. So a graph's static plan is what two runs in a row have
stored alike. A run that stores what is not in the plan, since shapes have changed, stores that as
values without a plan are stored; when two in a row have done the same, that is the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from storm_client.runs import Place, PlannedValue, Run, StaticPlan

if TYPE_CHECKING:
    from storm_client.session import Session

__all__ = ["Habit", "Rehearsal"]


class Habit:
    """What is known of one graph's runs in one session. Threads may share it, and lose a lesson."""

    __slots__ = ("_last", "plan")

    def __init__(self) -> None:
        """Know nothing yet."""
        self.plan: StaticPlan | None = None
        self._last: list[PlannedValue] = []
        """What the last run stored, if that was not the plan's."""

    def learn(self, values: list[PlannedValue], session: Session, codec: str) -> None:
        """Note what a run has stored."""
        if not values or (self.plan is not None and self.plan.covers(values)):
            self._last = []
        elif values == self._last:
            self._last, self.plan = [], session.register(values, codec)
        else:
            self._last = values


class Rehearsal:
    """What one run stores in one session: under the plan that there is, and for the next."""

    __slots__ = ("_habit", "_run", "_session", "_values")

    def __init__(self, habit: Habit, session: Session, owner: object) -> None:
        """Begin; the run of the plan is over with `owner` at the latest."""
        self._habit, self._session = habit, session
        self._values: list[PlannedValue] = []
        plan = habit.plan
        self._run: Run | None = None if plan is None else session.begin_run(plan, owner)

    def place(self, value: PlannedValue) -> Place | None:
        """Note that the run stores a value; return its place in the plan, if it has one."""
        self._values.append(value)
        first = None if self._run is None else self._run.plan.first(value)
        return None if self._run is None or first is None else Place(self._run, first)

    def learn(self, codec: str) -> None:
        """Learn from the run, which has stored all that it does."""
        self._habit.learn(self._values, self._session, codec)

    def end(self) -> None:
        """End the run, whatever has become of it."""
        if self._run is not None:
            self._session.end_run(self._run)
