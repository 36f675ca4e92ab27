"""Decides when a chunk is copied to the pool directly, as raw bytes without an encoder. Pure.

Long matrix products and attention take all registers of the device. Beside such kernels of a
trainer no kernel of the daemon runs until they end, but copies do. So the link would idle once the
blobs in scratch have been sent. A directly copied chunk takes more of the link and the pool than
its blob would. So it is copied directly only if the link has nothing else to do.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["LATE_SECONDS", "MAX_COPIES", "StoreState", "should_copy_unencoded"]

MAX_COPIES: Final = 2
"""Most direct copies of one session on the link. The second is queued before the first ends, and
blobs that are ready meanwhile wait for no more than these."""

LATE_SECONDS: Final = 0.001
"""Longer than an encoder takes that can start, except for large ones beside short products, which
keep the link busy (DESIGN.md has the measurement)."""


class StoreState(NamedTuple):
    """The state of a session's stores when the next one is to begin.

    `encoders_wait` is for how many seconds no queued encoder has finished, 0.0 if none is queued.
    Of the session, `blobs` batches and `copies` direct chunks are in flight on the link.
    `link_is_idle` is whether no session has anything in flight there.
    """

    encoders_wait: float
    blobs: int
    copies: int
    link_is_idle: bool


def should_copy_unencoded(codec: str, outlook: StoreState) -> bool:
    """Return whether to copy a large chunk directly: codec "raw", or no space in scratch."""
    if outlook.copies >= MAX_COPIES:
        return False
    if codec == "raw":  # it has no use for an encoder, whatever the device does
        return True
    link_is_free = not outlook.blobs and (outlook.copies > 0 or outlook.link_is_idle)
    return link_is_free and outlook.encoders_wait >= LATE_SECONDS
