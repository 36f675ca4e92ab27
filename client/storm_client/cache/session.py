"""A session for the shared cache: moves tensors in chunks through its own staging area.

It moves chunks as every session does (`transfers`, `outbound`, `inbound`). This module adds what a
put and a get need beyond that: a put is committed as a whole or cancelled, and the entries that the
daemon lends to a get are released.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from storm_client.errors import DaemonLost, ProtocolMismatch, QuotaExceeded, StormError, UsageError
from storm_client.lanes import Lane
from storm_client.lanes.dtypes import dtype_name
from storm_client.planner import DeviceWindow
from storm_client.saved.ranges import Part
from storm_client.transport.connection import Connection
from storm_client.transport.io_thread import Listener
from storm_client.transport.restore import Inbound
from storm_client.transport.store import Outbound
from storm_client.transport.timeouts import STALL_SECONDS
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
"""Requested size: a few chunks in flight each way, and little of a GPU's memory."""


class CacheSession(Listener):
    """Puts and fetches tensors of one device. Any thread may use it; puts run one at a time."""

    def __init__(self, address: str, lane: Lane, timeout: float) -> None:
        """Open a session for the cache at `address` within `timeout` seconds.

        Raises:
            UsageError: the daemon keeps no cache, or the lane raises it.
            DaemonUnavailable: no daemon answers, or it accepts no session.
            ProtocolMismatch: the daemon speaks another version, or one without the cache.
        """
        self._lane = lane
        self._timeout = timeout
        self._putting = threading.Lock()  # a session has at most one open put
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
        """The device from which `put` reads, and to which `fetch` returns."""
        return self._lane.device

    @property
    def lost(self) -> bool:
        """Whether the daemon has ended or the session is closed."""
        return self._connection.lost

    def ask(self, message: Message) -> Message:
        """Send a request and return the daemon's answer.

        Raises:
            StormError: of the class that the daemon names in a refusal.
            DaemonLost: the daemon has ended, or does not answer in time.
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
            UsageError: the name is invalid, or a size exceeds what a message can carry.
            QuotaExceeded: the cache has no room for the tensor.
            DaemonLost: the daemon has ended or hangs. After any error nothing was put.
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
            try:
                self.ask(begin)
                self.ask(CacheCommit(self._store(data, dtype)))
            except BaseException:
                with suppress(StormError):  # else the session's end cancels the put
                    self.ask(CacheCancel())
                raise

    def fetch(self, found: CacheTensor) -> torch.Tensor:
        """Return the bytes that a CacheGet found, as a new uint8 tensor; release its entries.

        Raises:
            CorruptBlob, ActivationLost: the daemon cannot return the bytes.
            UsageError: a CUDA graph is being captured.
            DaemonLost: the daemon has ended or hangs.
        """
        parts = _parts(found)
        try:
            memory = self._inbound.restore_staged(found.first_entry, parts, found.nbytes)
        finally:
            with self._connection.lock, suppress(StormError):  # a lost connection has released them
                self._connection.send(0, _release(parts))
        self._lane.order_after_copies(memory)
        empty = torch.empty(0, dtype=torch.uint8, device=memory.device)
        return empty.set_(memory, 0, (found.nbytes,), (1,))

    def end_with(self, owner: object) -> None:
        """End the session automatically when `owner` is freed: nothing else can use the session."""
        self._connection.end_with(owner)

    def close(self) -> None:
        """End the session. May be called twice."""
        self._connection.close()
        self._lane.close()

    # --- called by the connection --------------------------------------------------------------

    def on_message(self, request: int, message: Message) -> None:
        """Handle a reply; a tensor that nobody waits for was asked for and then interrupted."""
        if isinstance(message, CacheTensor):
            self._connection.post(0, _release(_parts(message)))
        else:
            self._transfers.on_reply(request, message)

    # --- helpers ----------------------------------------------------------------------------

    def _store(self, data: torch.Tensor, dtype: torch.dtype) -> list[int]:
        """Store the chunks and return their entries, in order, once all have arrived."""
        count = -(-data.numel() // self._part_bytes)
        out = Outgoing(0, data.numel(), dtype, "ancf", count)
        self._outbound.store_staged(out, data.untyped_storage(), int(data.storage_offset()))
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
        """Return the error for a put whose chunk was not admitted."""
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


def _parts(found: CacheTensor) -> list[Part]:
    """Return the chunks of a tensor that the daemon has lent."""
    begins = range(0, found.nbytes, found.part_bytes)
    return [
        Part(entry, begin, min(found.part_bytes, found.nbytes - begin))
        for entry, begin in enumerate(begins, start=found.first_entry)
    ]


def _release(parts: list[Part]) -> Release:
    return Release([part.entry for part in parts])


def _check_cache(address: str, welcome: Welcome) -> None:
    if CACHE_FEATURE not in welcome.features:
        raise ProtocolMismatch(
            f"the daemon at {address} knows no cache; install the client's version of stormd there"
        )
