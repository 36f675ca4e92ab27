"""What stands where a session has no lane: one for control alone, which asks and stores nothing.

The ledger refuses such a session every job, so that nothing of it ever comes here but its beginning
and its end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from stormd.lanes import Attachment, Post
from stormd.ledger.events import Detached, Mappable, RestoreJob, SegmentRefused, StoreJob
from stormd.protocol import NO_LANE, Hello

__all__ = ["NoLane"]


class NoLane:
    """Keeps the contract of a lane for sessions that share no memory; answers go to `post`."""

    device: Final = NO_LANE
    heartbeats: Final = ()
    links: Final = ()

    def __init__(self, post: Post) -> None:
        self._post = post

    def extend(self, offset: int, nbytes: int) -> None:
        """Do nothing: no session stores."""

    def retract(self, offset: int, nbytes: int) -> None:
        """Do nothing: no session stores."""

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:  # noqa: ARG002 - nothing is shared
        """Share nothing."""
        for descriptor in descriptors:
            os.close(descriptor)
        return Attachment(descriptors=(), staging_bytes=0, part_bytes=1, segment_bytes=0)

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> tuple[()]:
        """Refuse: the ledger lets no job of such a session pass."""
        raise AssertionError(f"{len(jobs)} jobs of session {session}, which has no lane")

    def skip(self, session: int, sequence: int) -> None:
        """Do nothing: nobody waits for a sequence number."""

    def recorded(self, session: int, sequences: Sequence[int]) -> None:
        """Do nothing: there are no stores."""

    def map_segment(self, session: int, request: Mappable, descriptor: int = -1) -> None:
        """Refuse."""
        if descriptor >= 0:
            os.close(descriptor)
        refused = SegmentRefused(session=session, segment=request.segment, detail="no lane")
        self._post(refused)

    def unmap_segment(self, session: int, segment: int) -> None:
        """Do nothing: there is no segment."""

    def detach(self, session: int) -> None:
        """Say that nothing of the session is left."""
        self._post(Detached(session))

    def close(self, seconds: float) -> bool:  # noqa: ARG002 - nothing runs
        """Return True: there are no workers."""
        return True
