"""The data paths of the daemon, one module a kind of device, and the contract they keep.

A lane does what the ledger has admitted and decides nothing itself. Each job that was handed over
is answered by exactly one result, whatever happens, and a session's memory is untouched from its
`Detached` on. Results reach the event loop through the lane's mailbox.

Encode and decode are steps from an address to an address: of host memory on the cpu lane, of
device memory on a stream on the cuda lane. Ranges in jobs lie inside their segment: that was
checked before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from stormd.ledger.events import (
    Detached,
    Mappable,
    RestoreJob,
    Result,
    SegmentRefused,
    StoreJob,
)
from stormd.monitoring.health import Heartbeat
from stormd.monitoring.link_meter import LinkMeter
from stormd.protocol import NO_LANE, Hello

__all__ = ["NOTHING_SHARED", "SEE_LOG", "Attachment", "Lane", "LinkSpeed", "Post"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What a lane has set up for a session.

    `descriptors` go to the client, timeline page first; the caller closes them. `staging_bytes`
    is the staging area's size as granted, `part_bytes` the largest entry. `segment_bytes` is the
    size of segment 0 where it is the staging area and exists already, 0 where the client maps it.
    """

    descriptors: tuple[int, ...]
    staging_bytes: int
    part_bytes: int
    segment_bytes: int


NOTHING_SHARED: Final = Attachment(descriptors=(), staging_bytes=0, part_bytes=1, segment_bytes=0)
"""Of a session without a lane in this process."""


class LinkSpeed(NamedTuple):
    """Of one device's link, in bytes a second each way; 0 where there is none or it is unknown."""

    measured: int = 0
    """Of the copies of late, in the slower direction."""
    limit: int = 0
    """What the settings allow."""


SEE_LOG: Final = "see the daemon's log"

Post = Callable[[*tuple[Result, ...]], None]
"""Takes results, several at once where they arise together; from any thread."""


class Lane:
    """One device's data path. All methods are called on the event loop and never block it.

    But for `extend` and `retract`, which are called on a thread of their own, and may.

    Where a method is not overridden there is nothing to do for it: no link, no sequence numbers, no
    segments of clients. As it stands it is the lane of sessions that have none: those for control
    alone, to which the ledger refuses every job, and those that a worker process serves.
    """

    device: str = NO_LANE
    """A name of protocol.DEVICES, or NO_LANE."""

    def __init__(self, post: Post) -> None:
        self._post = post

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """The signs of life of the workers there are now.

        A worker is inside its heartbeat only while it does what must end by itself, never while it
        waits for a client.
        """
        return ()

    @property
    def fault(self) -> str:
        """Why its devices cannot be used any more by this process; empty while they can."""
        return ""

    @property
    def links(self) -> tuple[LinkMeter, ...]:
        """What is known of the links to its devices, one a device; none where there is no link."""
        return ()

    def link_speed(self, session: int) -> LinkSpeed:  # noqa: ARG002 - there is no link
        """Return what is known of the link to a session's device; nothing of an unknown session."""
        return LinkSpeed()

    def limit_link(self, bytes_per_second: int) -> None:
        """Have copies that begin from now on take as long as over such a link; 0 for no limit."""

    def extend(self, offset: int, nbytes: int) -> None:
        """Take in a further range of the pool, which is resident.

        Raises:
            LaneUnavailable: a device cannot reach it; nothing of it is kept.
        """

    def retract(self, offset: int, nbytes: int) -> None:
        """Let a range go that was taken in so, and of which nothing is used."""

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:  # noqa: ARG002 - nothing is shared
        """Set a session's shared memory up.

        With `descriptors`, which are the lane's from then on, it is what an earlier daemon has set
        up and the client has had since: as many, of the sizes of then, and none is to be handed
        over. `hello.staging_bytes` is then what was granted.

        Raises:
            LaneUnavailable: this session cannot be served; nothing of it is left.
        """
        for descriptor in descriptors:
            os.close(descriptor)
        return NOTHING_SHARED

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> Sequence[Result]:
        """Begin a session's jobs, in their order; return the results of what is done already.

        Each store is answered by StoreDone or StoreFailed, each restore by RestoreDone or
        RestoreFailed.
        """
        raise AssertionError(f"{len(jobs)} jobs of session {session}, which has no lane")

    def skip(self, session: int, sequence: int) -> None:
        """Note that the store of this sequence number was rejected. No answer.

        Called in the order of the session's stores: a lane that counts them on the session's
        timeline passes it over, so that nobody waits for it.
        """

    def recorded(self, session: int, sequences: Sequence[int]) -> None:
        """Note that what came of the stores of these numbers is written down. No answer.

        Of those alone whose results named their `sequence`: where a source may be used again only
        then, because the session outlives the daemon.
        """

    def map_segment(self, session: int, request: Mappable, descriptor: int = -1) -> None:
        """Begin to map a segment, or a piece; answered by SegmentMapped or SegmentRefused.

        `descriptor` is that of the piece, and the lane's from then on.
        """
        if descriptor >= 0:
            os.close(descriptor)
        detail = f"the {self.device} lane maps no segments: use segment 0, the staging area"
        self._post(SegmentRefused(session=session, segment=request.segment, detail=detail))

    def unmap_segment(self, session: int, segment: int) -> None:
        """Unmap a segment, or a piece, once no job in flight uses it. No answer."""

    def detach(self, session: int) -> None:
        """Skip the session's waiting jobs, finish what runs, let its memory go; then Detached."""
        self._post(Detached(session))

    def close(self, seconds: float) -> bool:  # noqa: ARG002 - there are no workers
        """End the workers; False where one still runs after `seconds`.

        Sessions are detached, or are to go on with another daemon: nothing is answered then, and
        their clients' memory is as if the process had been killed.
        """
        return True
