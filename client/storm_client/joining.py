"""Puts messages about one part each together into messages about several, before they leave.

What a part costs is mostly its message. Parts are said one by one where they arise, and joined
where a frame is made, so nobody waits for others to come; only neighbours are, so the order stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from stormd.protocol import Envelope, Message, Restore, RestoreParts, StoreParts, pack

__all__ = ["joined"]


def joined(batch: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return messages that say the same in the same order, in as few envelopes as may be.

    A batch has at most MAX_BATCH messages of these kinds, each about one part.
    """
    made: list[Envelope] = []
    for key, group in groupby(batch, _key):
        same = list(group)
        made += same if key is None or len(same) < 2 else [_join(same)]
    return made


def _key(envelope: Envelope) -> tuple[object, ...] | None:
    """Return what messages have in common that can be joined; None for what cannot."""
    message = envelope.message
    match message:
        case Restore():
            return (Restore,)
        case StoreParts():
            return StoreParts, message.run
    return None


def _join(same: Sequence[Envelope]) -> Envelope:
    first = same[0].message
    messages: Iterable[Message] = (one.message for one in same)
    joint: Message
    match first:
        case Restore():
            joint = RestoreParts(pack([n for one in messages for n in one.to_wire()]))
        case StoreParts():
            places = [one.places for one in messages if isinstance(one, StoreParts)]
            joint = StoreParts(run=first.run, places=b"".join(places))
        case _:
            raise AssertionError(f"{type(first).__name__} is not joined")
    return Envelope(0, joint)
