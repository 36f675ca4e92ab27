"""Names the ways in which a plan recomputes values. What is proved for one way is not for another.

Two plans recompute a value in the same way if both hold its operation's inputs alike: each input is
kept in both, offloaded in both, or recomputed in both in the same way. And either plan recomputes
something that has overwritten the value, or neither does.

An input that no operation made is copied for the first operation that reads it and is recomputed.
Until a later operation reads it, something may write to it uncounted. So that first operation is
part of the way as well.

A way has the same name in all plans, also in those of other step signatures. So a step can compare
what it did under one plan with what another plan says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

from storm_client.eager.events import SAVED, Event, RecordedValue
from storm_client.planner.decisions import Decision, Replay

__all__ = ["NO_WAY", "Way", "first_readers", "ways_of"]

Way: TypeAlias = bytes
"""The name of a way."""

NO_WAY: Final[Way] = b""
"""Of a value that is not recomputed."""


def first_readers(
    events: Iterable[Event], values: Sequence[RecordedValue], decisions: Sequence[Decision]
) -> dict[int, int]:
    """Return for each input that recipes copy the recomputed value whose operation reads it first.

    Inputs that are recomputed themselves are among them; nobody copies those.
    """
    readers: dict[int, int] = {}
    for what, reader, _, inputs in events:
        if what is not SAVED and isinstance(decisions[reader], Replay):
            for number in inputs:
                if number >= 0 and values[number].is_copied:
                    readers.setdefault(number, reader)
    return readers


def ways_of(
    values: Sequence[RecordedValue], decisions: Sequence[Decision], readers: dict[int, int]
) -> list[Way]:
    """Return the way in which each value is recomputed; `readers` are the `first_readers`."""
    made = [isinstance(decision, Replay) for decision in decisions]
    overwritten = {n for value in values if made[value.number] for n in value.over}
    found: dict[int, Way] = {}

    def way(number: int) -> Way:
        if number not in found:
            found[number] = NO_WAY  # for a value made from itself, which no plan recomputes
            held = tuple(map(held_as, values[number].inputs))
            key = number, number in overwritten, held
            found[number] = blake2b(repr(key).encode(), digest_size=16).digest()
        return found[number]

    def held_as(number: int) -> tuple[object, ...]:
        if number < 0:
            return (number,)
        if made[number]:
            return number, way(number)
        return number, type(decisions[number]).__name__, readers.get(number)

    return [way(number) if is_made else NO_WAY for number, is_made in enumerate(made)]
