"""When a chunk is copied to the pool as it is, because the device has no room for encoders: pure.

Beside kernels of a trainer that take all of the device's registers, as long products and attention
do, nothing of the daemon runs until they end, but copies do. So the link would idle once the blobs
that scratch holds have been sent. A chunk that goes as it is takes more of the link and of the pool
than its blob would: hence only where the link has nothing else to do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["LATE_SECONDS", "MOST_COPIES", "Outlook", "goes_direct"]

MOST_COPIES: Final = 2
"""Of one session on the link: the second is there before the first ends, and blobs that come
meanwhile wait for no more."""

LATE_SECONDS: Final = 0.001
"""Longer than an encoder takes that gets in, but for large ones beside short products, which keep
the link busy (DESIGN.md has the measurement)."""


class Outlook(NamedTuple):
    """How far a session's stores have come when the next one is to be begun.

    For `encoders_wait` seconds none of the encoders that are queued has passed, 0.0 where none is.
    Of the session, `blobs` batches and `copies` direct chunks are in flight down the link;
    `link_is_idle` is whether nothing of anybody's is.
    """

    encoders_wait: float
    blobs: int
    copies: int
    link_is_idle: bool


def goes_direct(codec: str, outlook: Outlook) -> bool:
    """Tell whether a large chunk is copied as it is: scratch has no room, or with codec "raw"."""
    if outlook.copies >= MOST_COPIES:
        return False
    if codec == "raw":  # it has no use for an encoder, whatever the device does
        return True
    link_is_free = not outlook.blobs and (outlook.copies > 0 or outlook.link_is_idle)
    return link_is_free and outlook.encoders_wait >= LATE_SECONDS
