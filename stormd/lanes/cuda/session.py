"""One session on one GPU: its two directions, and its beginning and end.

Each job is answered once, whatever happens to the client. A client's memory is mapped and unmapped
only while no job uses it. No stream waits for a client: on a device with fewer queues than streams
that would delay other sessions, or block this one for ever.

Stores and restores have one pipeline each, so that they overlap. The pipelines' threads read how
far the client's counter has advanced, and put the work on the device that may be done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

from storm_kernels.errors import KernelsError

from stormd.errors import LaneUnavailable
from stormd.lanes.cuda.client import CudaClient
from stormd.lanes.cuda.pipeline import Pipeline
from stormd.lanes.cuda.restores import Restores
from stormd.lanes.cuda.scratch import Scratch, UnencodedCopy
from stormd.lanes.cuda.stores import Stores
from stormd.ledger.events import (
    Detached,
    Mappable,
    RestoreJob,
    SegmentMapped,
    SegmentRefused,
    StoreJob,
)
from stormd.open_files import close_all

__all__ = ["CudaSession"]

log = logging.getLogger(__name__)

POISON_SECONDS: Final = 0.01
"""Seconds between two poisonings of a dead client's counter, until both threads have ended. A write
that the client's device still had in flight may undo the first poisoning."""


class CudaSession:
    """Serves a client until `detach`; results go to its `post`, from several threads.

    The page and the client's memory stay mapped until Detached has been posted.
    """

    def __init__(self, client: CudaClient) -> None:
        self._client = client
        self.device = client.device
        name = f"{client.session & 0xFFFFFFFF:x}"
        self._stages = Stores(client)
        self.stores: Pipeline[StoreJob, Scratch | UnencodedCopy] = Pipeline(
            f"stormd-out-{name}", self._stages
        )
        self.restores: Pipeline[RestoreJob, Scratch] = Pipeline(
            f"stormd-back-{name}", Restores(client)
        )
        self.heartbeats = (self.stores.heartbeat, self.restores.heartbeat)
        self._end = threading.Thread(target=self._close, name=f"stormd-end-{name}", daemon=True)
        for pipeline in (self.stores, self.restores):
            pipeline.run(client.device.context.make_current)

    # --- called on the event loop -----------------------------------------------------------

    def map_segment(self, request: Mappable, descriptor: int) -> None:
        """Map the segment in the store thread; answered by SegmentMapped or SegmentRefused."""
        self.stores.run(partial(self._map, request, descriptor))

    def unmap_segment(self, segment: int) -> None:
        """Unmap the segment once the jobs that were queued before are done."""
        both = threading.Barrier(2, action=partial(self._client.unmap, segment))
        for pipeline in (self.stores, self.restores):
            pipeline.run(partial(_meet, both))

    def store(self, job: StoreJob) -> None:
        """Queue a store in its pipeline."""
        self._stages.expect(job.sequence)
        self.stores.put(job)

    def skip_sequence(self, sequence: int) -> None:
        """Note that the store of that number was rejected; ordered after the stores before it."""
        self._stages.expect(sequence)
        if self._client.is_resumable:
            self.recorded([sequence])
        else:
            self.stores.follow(partial(self._stages.release_source, sequence))

    def recorded(self, sequences: Sequence[int]) -> None:
        """Note that the outcomes of these stores are recorded and so outlive the daemon."""
        self._stages.recorded(sequences)

    def abandon(self) -> None:
        """Stop serving the client and free everything; nothing is answered any more.

        The device does the work that it has been given already. The client's memory is untouched
        once `join` has returned True.
        """
        self.stores.stop()
        self.restores.stop()
        self._end.start()

    def detach(self) -> None:
        """Release all that waits for the client, end both threads, free all; then post Detached."""
        self._client.poison()
        self.stores.end()
        self.restores.end()
        self._end.start()

    def join(self, seconds: float) -> bool:
        """Wait for the end that `detach` or `abandon` began; return False after `seconds`."""
        self._end.join(seconds)
        return not self._end.is_alive()

    # --- run between jobs, in the store thread ----------------------------------------------

    def _map(self, request: Mappable, descriptor: int) -> None:
        client = self._client
        try:
            if not client.is_open:
                self._open()
            client.map(request, descriptor)
        except (KernelsError, LaneUnavailable, ValueError) as error:
            detail = f"segment {request.segment} cannot be mapped: {error}"
            log.warning("session %016x: %s", client.session, detail)
            client.post(
                SegmentRefused(
                    session=client.session, segment=request.segment, detail=detail[:1000]
                )
            )
            return
        finally:
            close_all((descriptor,))
        client.post(SegmentMapped(session=client.session, segment=request.segment))

    def _open(self) -> None:
        """Give both directions their scratch, before the first job of either can come."""
        self._client.open()
        opened = self._client.opened
        self.stores.set_scratch_source(opened.scratch.out)
        self.restores.run(partial(self.restores.set_scratch_source, opened.scratch.back))

    # --- run by a thread of its own at the end ----------------------------------------------

    def _close(self) -> None:
        for pipeline in (self.stores, self.restores):
            while not pipeline.join(POISON_SECONDS):
                if not pipeline.is_stopped:
                    self._client.poison()
        self._client.close()
        if not self.stores.is_stopped:
            self._client.post(Detached(self._client.session))


def _meet(barrier: threading.Barrier) -> None:
    """Wait for the other thread. It arrives: calls are made even when the session has ended."""
    barrier.wait()
