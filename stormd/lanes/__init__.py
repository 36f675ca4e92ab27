"""The data paths of the daemon: one module per kind of device, and the contract that all keep.

A lane executes the jobs that the ledger has admitted and decides nothing itself. It answers each
job with exactly one result, also on failure. It does not touch a session's memory after it has
posted `Detached` for that session. Results reach the event loop through the lane's mailbox.

Encode and decode are steps from one address to another: in host memory on the cpu lane, in device
memory and on a stream on the cuda lane. The ledger has already checked that the ranges in jobs lie
inside their segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from stormd.ledger.events import Detached, Mappable, RestoreJob, Result, SegmentRefused, StoreJob
from stormd.monitoring.health import Heartbeat
from stormd.monitoring.link_meter import LinkMeter
from stormd.open_files import close_all
from stormd.protocol import NO_LANE, Hello

__all__ = ["NOTHING_SHARED", "SEE_LOG", "Attachment", "Lane", "Post", "Speeds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """The shared memory that a lane has set up for a session.

    `descriptors` are sent to the client, timeline page first; the caller closes them.
    `staging_bytes` is the granted size of the staging area, `chunk_bytes` the size of the largest
    entry. `segment_bytes` is the size of segment 0 if that is the staging area and exists already;
    it is 0 if the client maps segment 0.
    """

    descriptors: tuple[int, ...]
    staging_bytes: int
    chunk_bytes: int
    segment_bytes: int


NOTHING_SHARED: Final = Attachment(descriptors=(), staging_bytes=0, chunk_bytes=1, segment_bytes=0)
"""The attachment of a session without a lane in this process."""


class Speeds(NamedTuple):
    """How fast a session's bytes are transferred, in bytes a second; 0 if unknown."""

    link: int = 0
    """Of the device's link over the latest copies, in the slower direction."""
    limit: int = 0
    """Of the link each way by the settings; 0 without a limit."""
    coding: int = 0
    """Of encoding and decoding on the device, one after the other."""


SEE_LOG: Final = "see the daemon's log"

Post = Callable[[*tuple[Result, ...]], None]
"""Takes results, several at once where they arise together; may be called from any thread."""


class Lane:
    """One device's data path. All methods are called on the event loop and never block it.

    Exceptions are `extend` and `retract`: they are called on a thread of their own and may block.

    A lane does not override a method that has nothing to do: without a link, sequence numbers or
    client segments. This base class is the lane of sessions without a data path of their own here:
    sessions for control alone, whose jobs the ledger refuses, and sessions served by a worker
    process.
    """

    device: str = NO_LANE
    """A name of protocol.DEVICES, or NO_LANE."""

    def __init__(self, post: Post) -> None:
        self._post = post

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """The heartbeats of the current workers.

        A worker is inside its heartbeat only during work that must end by itself, never while it
        waits for a client.
        """
        return ()

    @property
    def fault(self) -> str:
        """Why this process can no longer use the lane's devices; empty while it can."""
        return ""

    @property
    def links(self) -> tuple[LinkMeter, ...]:
        """The meters of the links to the lane's devices, one per device; empty without a link."""
        return ()

    def speeds(self, session: int) -> Speeds:  # noqa: ARG002 - there is no link
        """Return the speeds of a session's device; zeros for an unknown session."""
        return Speeds()

    def limit_link(self, bytes_per_second: int) -> None:
        """Slow down all copies that begin from now on to such a link; 0 means no limit."""

    def extend(self, offset: int, nbytes: int) -> None:
        """Add a range of the pool, which is resident, to those that the lane's devices can access.

        Raises:
            LaneUnavailable: a device cannot access the range; no part of it is added.
        """

    def retract(self, offset: int, nbytes: int) -> None:
        """Remove a range that `extend` added and that nothing uses any more."""

    def attach(self, session: int, hello: Hello, descriptors: Sequence[int] = ()) -> Attachment:  # noqa: ARG002 - nothing is shared
        """Set up a session's shared memory.

        With `descriptors`, which the lane then owns, the memory is what an earlier daemon set up
        and the client still has. The descriptors match those of that time in number and size, and
        none is sent to the client. `hello.staging_bytes` is then the size that was granted.

        Raises:
            LaneUnavailable: this session cannot be served; nothing is set up.
        """
        close_all(descriptors)
        return NOTHING_SHARED

    def begin(self, session: int, jobs: Sequence[StoreJob | RestoreJob]) -> Sequence[Result]:
        """Begin a session's jobs in order; return the results of those that are done already.

        Each store is answered by StoreDone or StoreFailed, each restore by RestoreDone or
        RestoreFailed.
        """
        raise AssertionError(f"{len(jobs)} jobs of session {session}, which has no lane")

    def skip_sequence(self, session: int, sequence: int) -> None:
        """Note that no job follows for this sequence number, e.g. a rejected store. Not answered.

        Called in the order of the session's stores. A lane that counts stores on the session's
        timeline advances past this number, so that nobody waits for it.
        """

    def recorded(self, session: int, sequences: Sequence[int]) -> None:
        """Note that the outcomes of the stores with these numbers are recorded. Not answered.

        Called only for stores whose results named their `sequence`. Their session outlives the
        daemon, so their sources may be reused only after the outcome is recorded.
        """

    def map_segment(self, session: int, request: Mappable, descriptor: int = -1) -> None:
        """Begin to map a segment, or a piece; answered by SegmentMapped or SegmentRefused.

        `descriptor` is the descriptor of the piece; the lane then owns it.
        """
        close_all((descriptor,))
        detail = f"the {self.device} lane maps no segments: use segment 0, the staging area"
        self._post(SegmentRefused(session=session, segment=request.segment, detail=detail))

    def unmap_segment(self, session: int, segment: int) -> None:
        """Unmap a segment, or a piece, once no job in flight uses it. Not answered."""

    def detach(self, session: int) -> None:
        """Skip the session's waiting jobs, finish running ones, free its memory, post Detached."""
        self._post(Detached(session))

    def close(self, seconds: float) -> bool:  # noqa: ARG002 - there are no workers
        """End the workers; return False if one still runs after `seconds`.

        Sessions are detached already, or another daemon continues them. In the second case the lane
        answers nothing, and the clients' memory is as if the process had been killed.
        """
        return True
