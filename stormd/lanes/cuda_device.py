"""One GPU as all its sessions share it: context, codec, the pool as the device sees it, the link.

What stays true: the pool is registered before the first session and until after the last; each
direction of the link has one stream, so that both are busy at once and neither waits for the
other; copies to the host never wait for a client, so one thread can wait for all of them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from queue import SimpleQueue

from storm_kernels.ancf.cuda_launches import KIND_BYTES, BlobKind, blob_kind
from storm_kernels.cuda_driver import (
    DeviceBuffer,
    Event,
    MappedHost,
    PrimaryContext,
    RegisteredHost,
    Stream,
    copy_async,
    elapsed_seconds,
)
from storm_kernels.errors import CudaDriverError

from stormd.arena import Block
from stormd.health import Heart
from stormd.host_pool import HostPool
from stormd.lanes import blob_bound
from stormd.lanes.cuda_codec import DeviceCodec
from stormd.link_meter import LinkMeter

__all__ = ["CudaDevice", "Scratch"]

RESULT_BYTES = 64
"""Mapped host memory in which the codec leaves a blob's size, its status and its mode."""


class CudaDevice:
    """The device of one ordinal, ready to encode. Needs `close`.

    Raises:
        BackendUnavailable, CudaDriverError: the device cannot be used; nothing of it is left.
    """

    def __init__(self, ordinal: int, pool: HostPool) -> None:
        self._host_pool = pool
        with ExitStack() as made:
            self.context = made.enter_context(closing(PrimaryContext(ordinal)))
            self.context.make_current()
            self._pool = made.enter_context(closing(RegisteredHost(pool.address, pool.nbytes)))
            self.codec = made.enter_context(closing(DeviceCodec(ordinal)))
            self.down = made.enter_context(closing(Stream()))
            self.up = made.enter_context(closing(Stream()))
            self._made = made.pop_all()
        self.uuid = self.context.uuid
        self.link = LinkMeter(f"cuda:{ordinal}", self.uuid)
        self._copies: SimpleQueue[tuple[Event, Callable[[str], None]] | None] = SimpleQueue()
        self.heart = Heart(f"stormd-cuda-{ordinal}-down")
        self._waiter = threading.Thread(
            target=self._wait_for_copies, name=self.heart.name, daemon=True
        )
        self._waiter.start()

    def download(self, scratch: Scratch, block: Block) -> None:
        """Put the copy of the scratch's blob to its block on the stream `down`."""
        source = scratch.blob.address
        scratch.copy_began.record(self.down.handle)
        for offset, nbytes in block.pieces():
            for target, size in self._pool.pieces(offset, nbytes):
                copy_async(target, source, size, self.down.handle)
                source += size
        scratch.copied.record(self.down.handle)

    def upload(self, block: Block, scratch: Scratch) -> None:
        """Put the copy of a block's blob to the scratch on the stream `up`."""
        destination = scratch.blob.address
        scratch.copy_began.record(self.up.handle)
        for offset, nbytes in block.pieces():
            for source, size in self._pool.pieces(offset, nbytes):
                copy_async(destination, source, size, self.up.handle)
                destination += size
        scratch.copied.record(self.up.handle)

    def when_copied(self, scratch: Scratch, action: Callable[[str], None]) -> None:
        """Call `action`, in another thread, once the scratch's download is complete.

        It gets an empty text, or what went wrong with the copy, and must not raise.
        """
        self._copies.put((scratch.copied, action))

    def kind(self, block: Block) -> BlobKind:
        """Return what the blob's header, whose start no extent cuts in two, says it is.

        Raises:
            CorruptBlob: it names no element type.
        """
        header = self._host_pool.address + block.extents[0].offset
        return blob_kind(ctypes.string_at(header, KIND_BYTES))

    def close(self) -> None:
        """Let the device go; its sessions are gone. The pool must still be mapped."""
        self._copies.put(None)
        self._waiter.join()
        self.context.make_current()
        self._made.close()

    def _wait_for_copies(self) -> None:
        try:
            self._take_copies()
        except BaseException as error:
            self.heart.ended(f"{type(error).__name__}: {error}")
            raise

    def _take_copies(self) -> None:
        self.context.make_current()
        while (item := self._copies.get()) is not None:
            copied, action = item
            with self.heart:
                action(_problem(copied))


def _problem(copied: Event) -> str:
    """Wait for a copy; return what went wrong with it, empty where nothing did."""
    try:
        copied.synchronize()
    except CudaDriverError as error:
        return str(error)
    return ""


class Scratch:
    """What one part of up to `part_bytes` needs on its way: device memory, results, events.

    Raises:
        CudaDriverError: the device has no memory left; nothing is kept.
    """

    def __init__(self, device: CudaDevice, part_bytes: int) -> None:
        self.blob = DeviceBuffer(blob_bound(part_bytes))
        try:
            self.work = DeviceBuffer(device.codec.scratch_bytes(part_bytes))
        except CudaDriverError:
            self.blob.close()
            raise
        self.result = MappedHost(RESULT_BYTES)
        self.words = self.result.words()
        self.code_began, self.coded = Event(timed=True, awaited=False), Event(timed=True)
        self.copy_began, self.copied = Event(timed=True, awaited=False), Event(timed=True)

    def seconds(self) -> tuple[float, float]:
        """Return how long the device coded, and copied, the part; both have been passed."""
        coding = elapsed_seconds(self.code_began, self.coded)
        return coding, elapsed_seconds(self.copy_began, self.copied)

    def close(self) -> None:
        """Free all of it; no stream uses it any more."""
        for owned in (self.blob, self.work, self.result):
            owned.close()
        for event in (self.code_began, self.coded, self.copy_began, self.copied):
            event.close()
