"""One client's memory and counters as one GPU of the daemon sees them.

Every address that this module returns lies in memory that the client has offered and the daemon has
mapped. Values that the client writes into the shared page are checked before use.

Both directions of a session use it. Memory is mapped and unmapped between their jobs.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

from storm_kernels.cuda_driver import AddressRange, IpcMapping, RegisteredHost, Stream, write_value
from storm_kernels.errors import CudaDriverError, KernelsError

from stormd.errors import LaneUnavailable
from stormd.lanes import Post
from stormd.lanes.cuda.checks import Checks
from stormd.lanes.cuda.device import CudaDevice
from stormd.lanes.cuda.scratch import SessionScratch, session_chunks
from stormd.ledger.events import Mappable, RestoreJob, StoreJob
from stormd.memory.shared_memory import SharedMemory
from stormd.protocol import MapPiece, MapSegment, ReserveRange
from stormd.protocol.timeline import PAGE_BYTES, POISON, PUBLISHED, STORED, Timelines
from stormd.sizes import format_size

__all__ = ["SKIPPED", "UNWRITTEN", "CudaClient", "error_text"]

log = logging.getLogger(__name__)

SKIPPED: Final = "the session ended before it was done"
MAX_RESERVED: Final = 16
"""Address space that a session may reserve, as a multiple of the GPU's memory. PyTorch reserves
slightly more than all of the memory for each pair of stream and block size."""

UNWRITTEN: Final = (1 << 64) - 1
"""Status that the codec must overwrite."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The device objects of both directions of a session, which exist from its first segment on."""

    page: RegisteredHost
    store_stream: Stream
    restore_stream: Stream
    scratch: SessionScratch
    checks: Checks
    owned: ExitStack
    """Frees all of them once no stream uses them any more."""


class CudaClient:
    """The daemon's view of the client of one session; results go to `post`."""

    def __init__(
        self,
        session: int,
        device: CudaDevice,
        page: SharedMemory,
        *,
        chunk_bytes: int,
        direct_bytes: int,
        is_resumable: bool = False,
        post: Post,
    ) -> None:
        self.session = session
        self.device = device
        self.post = post
        self.is_resumable = is_resumable
        self._chunk_bytes = chunk_bytes
        self._direct_bytes = direct_bytes
        self._page = page
        self.timelines = Timelines(page.address)
        # The three below are written by the store thread while no job needs them, and read by both
        # threads.
        self._segments: dict[int, IpcMapping | AddressRange] = {}
        self._pieces: dict[int, tuple[AddressRange, int]] = {}  # with offset in range
        self._opened: Opened | None = None

    # --- for both directions ----------------------------------------------------------------

    @property
    def opened(self) -> Opened:
        """What `open` made before the first segment was mapped; every job names a segment."""
        assert self._opened is not None, "a job came before a segment"
        return self._opened

    @property
    def is_open(self) -> bool:
        """Whether `open` has made those objects."""
        return self._opened is not None

    def address(self, job: StoreJob | RestoreJob) -> int:
        """Return the device address of a job's range.

        Raises:
            ValueError: the range does not lie in its segment, although the ledger has checked it
                before.
        """
        mapping = self._segments[job.segment]
        if job.offset + job.nbytes > mapping.nbytes:
            raise ValueError(
                f"bytes {job.offset} to {job.offset + job.nbytes} are not in segment {job.segment} "
                f"of {mapping.nbytes}"
            )
        return mapping.address + job.offset

    def counter(self, counter: int) -> int:
        """Return the device's address of one of the session's counters."""
        return self.opened.page.device_address + counter

    def has_published(self, sequence: int) -> bool:
        """Return whether the client's work up to that number is done, or the client is dead.

        A number above POISON, which no right client sends, counts as POISON.
        """
        return self.timelines.read(PUBLISHED) >= min(sequence, POISON)

    def stored_through(self, sequence: int) -> None:
        """Raise STORED to a number, after the encoders on the store stream."""
        try:
            if self.is_open:
                write_value(self.opened.store_stream.handle, self.counter(STORED), sequence)
                return
        except CudaDriverError:
            log.exception("the store stream of session %016x is broken", self.session)
        self.timelines.store(STORED, sequence)

    def poison(self) -> None:
        """Release everything that waits for the client, now and later."""
        self.timelines.poison(PUBLISHED)

    # --- while neither has a job ------------------------------------------------------------

    def open(self) -> None:
        """Make the device objects of both directions; on an error none is kept.

        Raises:
            LaneUnavailable: the device gives no memory or stream.
        """
        with ExitStack() as made:
            try:
                page = made.enter_context(closing(RegisteredHost(self._page.address, PAGE_BYTES)))
                _, greatest = self.device.context.priorities()
                stores, restores = (made.enter_context(closing(Stream(greatest))) for _ in range(2))
                scratch = made.enter_context(
                    closing(SessionScratch(self.device, self._chunk_bytes, self._direct_bytes))
                )
                checks = made.enter_context(closing(Checks(self.device.codec, greatest)))
            except CudaDriverError as error:
                raise LaneUnavailable(
                    f"the GPU gives a session no scratch ({error}): make room there, or start the "
                    f"daemon with a part_bytes_cuda of less than {format_size(self._chunk_bytes)}, "
                    f"of which a session takes {session_chunks(self.device)}"
                ) from error
            owned = made.pop_all()
        self._opened = Opened(page, stores, restores, scratch, checks, owned)

    def map(self, request: Mappable, descriptor: int) -> None:
        """Map the memory that the client offers; the caller keeps the descriptor of a piece.

        Raises:
            KernelsError, ValueError: the memory cannot be mapped, or is not as the client described
                it.
        """
        if isinstance(request, MapPiece):
            into = self._segments.get(request.into)
            if not isinstance(into, AddressRange):
                raise ValueError(  # noqa: TRY004 - the number that the client gave is wrong
                    f"segment {request.into} is no range of addresses"
                )
            into.map(descriptor, request.offset, request.nbytes)
            self._pieces[request.segment] = into, request.offset
        elif isinstance(request, ReserveRange):
            self._segments[request.segment] = self._reserved(request.nbytes)
        else:
            self._segments[request.segment] = _opened(request)

    def _reserved(self, nbytes: int) -> AddressRange:
        """Reserve addresses; the limit is far above a client's memory and far below what exists."""
        total = self.device.context.total_bytes()
        ranges = [one for one in self._segments.values() if isinstance(one, AddressRange)]
        reserved = sum(one.nbytes for one in ranges) + nbytes
        if reserved > MAX_RESERVED * total:
            raise ValueError(
                f"a session has reserved {format_size(reserved)} of addresses, and may "
                f"{MAX_RESERVED} times the {format_size(total)} of the GPU"
            )
        return AddressRange(nbytes, self.device.context.ordinal)

    def unmap(self, segment: int) -> None:
        """Unmap a segment, with its pieces, or a piece."""
        try:
            piece = self._pieces.pop(segment, None)
            if piece is not None:
                into, offset = piece
                into.unmap(offset)
                return
            gone = self._segments.pop(segment)
            self._pieces = {n: at for n, at in self._pieces.items() if at[0] is not gone}
            gone.close()
        except KernelsError:
            log.exception("segment %d of session %016x cannot be unmapped", segment, self.session)

    def close(self) -> None:
        """Free everything: the mapped memory, the device's objects, the page."""
        try:
            self.device.context.make_current()
            if self.is_open:
                # A number may still have to be written, or a checksum computed that nobody waits
                # for.
                for stream in (self.opened.store_stream, self.opened.checks.stream):
                    self.device.settle(stream)
            with ExitStack() if self._opened is None else self._opened.owned as owned:
                for mapping in self._segments.values():
                    owned.callback(mapping.close)
        except KernelsError:
            log.exception("session %016x could not free all its device memory", self.session)
        self._page.close()


def _opened(request: MapSegment) -> IpcMapping:
    """Map an allocation by its handle.

    Raises:
        KernelsError, ValueError: it cannot be mapped, or is smaller than the client said.
    """
    mapping = IpcMapping(request.handle)
    if mapping.nbytes < request.nbytes:
        mapping.close()
        raise ValueError(f"the handle leads to {mapping.nbytes} bytes, not {request.nbytes}")
    return mapping


def error_text(error: Exception) -> str:
    """Return the text of the error for the client."""
    return f"{type(error).__name__}: {error}"
