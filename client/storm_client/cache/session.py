"""A session for the shared cache: tensors out and back, in chunks through its own staging area.

It moves its chunks as every session does (`transfers`, `outbound`, `inbound`); here is what a put
and a get are beyond that. A put is committed whole or cancelled, and what a get was lent is
released.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from storm_client.errors import (
    DaemonLost,
    ProtocolMismatch,
    QuotaExceeded,
    StormError,
    UsageError,
)
from storm_client.lanes import Lane
from storm_client.lanes.dtypes import dtype_name
from storm_client.planner import DeviceWindow
from storm_client.saved.ranges import Part
from storm_client.transport.connection import Connection
from storm_client.transport.io_thread import Listener
from storm_client.transport.patience import STALL_SECONDS
from storm_client.transport.restore import Inbound
from storm_client.transport.store import Outbound
from storm_client.transport.transfer import Outgoing
from storm_client.transport.transfers import Transfers
from stormd.protocol import (
    CACHE_FEATURE,
    CacheCancel,
    CacheCommit,
    CachePut,
    CacheTensor,
    Message,
    ProtocolError,
    Release,
    Welcome,
)

__all__ = ["CacheSession"]

STAGING_BYTES: Final = 64 << 20
"""Asked for: a few chunks in flight each way, and little of a GPU's memory."""


class CacheSession(Listener):
    """Puts and fetches the tensors of one device. Any thread may use it; puts take turns."""

    def __init__(self, address: str, lane: Lane, timeout: float) -> None:
        """Open a session for the cache at `address` within `timeout` seconds.

        Raises:
            UsageError: the daemon keeps no cache, or what the lane raises.
            DaemonUnavailable: nobody answers, or takes no session.
            ProtocolMismatch: the daemon speaks another version, or one without the cache.
        """
        self._lane = lane
        self._timeout = timeout
        self._putting = threading.Lock()  # one put is open in a session at a time
        hello = replace(lane.hello, features=(CACHE_FEATURE,), staging_bytes=STAGING_BYTES)
        self._connection = Connection(address, hello, timeout)
        try:
            self._connection.attach(lane, timeout)
            _check_cache(address, self._connection.welcome)
        except BaseException:
            self.close()
            raise
        self._transfers = Transfers(
            self._connection.numbers,
            self._connection.outbox,
            staging_bytes=lane.staging_bytes,
            part_bytes=self._connection.welcome.part_bytes,
            window=DeviceWindow(0),
        )
        self._part_bytes = self._transfers.stores.part_bytes
        self._outbound = Outbound(self._connection, lane, self._transfers, STALL_SECONDS)
        self._inbound = Inbound(self._connection, lane, self._transfers)
        self._connection.start(self)

    @property
    def device(self) -> torch.device:
        """Where the bytes of `put` are and those of `fetch` come to."""
        return self._lane.device

    @property
    def lost(self) -> bool:
        """Whether the daemon is gone or the session closed."""
        return self._connection.lost

    def ask(self, message: Message) -> Message:
        """Return the daemon's answer.

        Raises:
            StormError: the kind that the daemon names in a refusal.
            DaemonLost: it is gone, or does not answer in time.
        """
        return self._connection.request(message, self._timeout)

    def put(
        self,
        name: str,
        dtype: torch.dtype,
        shape: list[int],
        ttl_seconds: float,
        data: torch.Tensor,
    ) -> None:
        """Put `data`, a contiguous uint8 tensor on `device`, as one of `dtype` and `shape`.

        `ttl_seconds` is 0 for no limit.

        Raises:
            UsageError: the name, or a size beyond what a message can say.
            QuotaExceeded: the cache has no room for it.
            DaemonLost: the daemon is gone or hangs. After any error there is no put.
        """
        kind, nbytes = dtype_name(dtype), data.numel()
        try:
            begin = CachePut(
                name=name,
                dtype=kind,
                shape=shape,
                nbytes=nbytes,
                part_bytes=self._part_bytes,
                ttl_seconds=ttl_seconds,
            )
        except ProtocolError as error:
            raise UsageError(str(error).removeprefix("CachePut.")) from error
        with self._putting:
            self.ask(begin)
            try:
                self.ask(CacheCommit(self._store(data, dtype)))
            except BaseException:
                with suppress(StormError):  # where even that fails, the session's end cancels it
                    self.ask(CacheCancel())
                raise

    def fetch(self, found: CacheTensor) -> torch.Tensor:
        """Return the bytes of what a CacheGet found, as a new uint8 tensor; release it.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot give them back.
            UsageError: a CUDA graph is being captured.
            DaemonLost: it is gone or hangs.
        """
        size = found.part_bytes
        begins = range(0, found.nbytes, size)
        parts = [
            Part(entry, begin, min(size, found.nbytes - begin))
            for entry, begin in enumerate(begins, start=found.first_entry)
        ]
        try:
            memory = self._inbound.bring(found.first_entry, parts, found.nbytes)
        finally:
            entries = [part.entry for part in parts]
            with self._connection.lock, suppress(StormError):  # its loss has released them
                self._connection.send(0, Release(entries))
        self._lane.use(memory)
        empty = torch.empty(0, dtype=torch.uint8, device=memory.device)
        return empty.set_(memory, 0, (found.nbytes,), (1,))

    def end_with(self, owner: object) -> None:
        """Have the session end by itself when its owner dies: nobody else can use it."""
        self._connection.end_with(owner)

    def close(self) -> None:
        """End the session. Calling it twice is fine."""
        self._connection.close()
        self._lane.close()

    # --- what the connection tells of ---------------------------------------------------------

    def on_message(self, request: int, message: Message) -> None:
        """Handle a reply."""
        self._transfers.reply(request, message)

    # --- helpers ----------------------------------------------------------------------------

    def _store(self, data: torch.Tensor, dtype: torch.dtype) -> list[int]:
        """Store the chunks and return their entries, in order, once all have arrived."""
        count = -(-data.numel() // self._part_bytes)
        out = Outgoing(0, data.numel(), dtype, "ancf", count)
        self._outbound.copy(out, data.untyped_storage(), int(data.storage_offset()))
        with self._connection.lock:
            self._connection.flush()
            while not out.is_over:
                self._wait_for_part(out)
        if out.error is not None:
            raise out.error
        if out.refusal is not None:
            raise self._refusal(*out.refusal)
        return sorted(out.arrived)

    def _wait_for_part(self, out: Outgoing) -> None:
        arrived, deadline = len(out.arrived), time.monotonic() + STALL_SECONDS
        while not out.is_over and len(out.arrived) == arrived:
            if not self._connection.wait(deadline):
                raise DaemonLost(self._stalled("does not answer"))

    def _refusal(self, reason: str, detail: str) -> StormError:
        """Return the error for a put of which a chunk was not admitted."""
        if reason == "daemon_slow":
            return DaemonLost(self._stalled("frees no room in the staging area"))
        if reason == "draining":
            return DaemonLost(f"{detail}; what was put is not kept")
        return (UsageError if reason == "invalid" else QuotaExceeded)(detail)

    def _stalled(self, what: str) -> str:
        return (
            f"the daemon at {self._connection.address} {what} for {STALL_SECONDS:g} s; see "
            "`stormd status` and its log"
        )


def _check_cache(address: str, welcome: Welcome) -> None:
    if CACHE_FEATURE not in welcome.features:
        raise ProtocolMismatch(
            f"the daemon at {address} knows no cache; install the client's version of stormd there"
        )
