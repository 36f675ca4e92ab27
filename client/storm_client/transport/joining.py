"""Puts restores of one part each together into one message, before they leave.

What a part costs is mostly its message. Parts are asked for one by one where they are needed, and
joined where a frame is made, so nobody waits for others to come; only neighbours are, so the order
stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from stormd.protocol import Envelope, Restore, RestoreParts, pack

__all__ = ["joined"]


def joined(batch: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return messages that say the same in the same order, in as few envelopes as may be.

    A batch has at most MAX_BATCH restores.
    """
    made: list[Envelope] = []
    for is_restore, group in groupby(batch, _is_restore):
        same = list(group)
        made += [_join(same)] if is_restore and len(same) > 1 else same
    return made


def _is_restore(envelope: Envelope) -> bool:
    return isinstance(envelope.message, Restore)


def _join(restores: Iterable[Envelope]) -> Envelope:
    numbers = [number for _, message in restores for number in message.to_wire()]
    return Envelope(0, RestoreParts(pack(numbers)))
