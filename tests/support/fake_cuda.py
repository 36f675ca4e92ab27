"""GPUs made of host memory and threads, with the calls that the cuda lane uses.

What stays true: a stream does its work in order in a thread of its own, nothing is done before
its turn, and waits on counters are real: what would hang on a device hangs here. What a device
forgives by chance is an error here: memory used after it was freed or unmapped, or by two streams
at once; a call in a thread that has not entered the context, or about another device's stream; a
range registered twice. A mapping lies at an address of its own and keeps the memory, as on a GPU.

Work that touches what it must not breaks its device for good, as a fault does, and is kept in
`faults`. `lag_seconds` is by how much each piece of work may be late, at random.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from queue import SimpleQueue
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
from storm_kernels import ancf
from storm_kernels.ancf.checksum import checksum
from storm_kernels.ancf.cuda_launches import KIND_BYTES, PIPELINES, blob_kind
from storm_kernels.ancf.layout import CHECK_LENGTH
from storm_kernels.errors import CorruptBlob, CudaDriverError, KernelsError
from support.fake_device_memory import Access, DeviceMemory, Range, writes_to

UUIDS = tuple(f"00000000-0000-0000-0000-00000000f4c{number}" for number in range(2))
UUID = UUIDS[0]
POLL_SECONDS = 0.0005
TOTAL_BYTES = 1 << 30
ALIGNMENT = 16
"""Bytes, of what a codec writes to."""

lag_seconds = 0.0
shared_by_mps = False
faults: list[str] = []
live: set[object] = set()
"""Everything that was made and not closed."""

_HANDLE = struct.Struct("<8sQQ40x")
_numbers = count(1)
_streams: dict[int, Stream] = {}
_default_streams: dict[int, Stream] = {}
_broken: dict[int, str] = {}
_thread = threading.local()


def repair() -> None:
    """Make broken devices whole."""
    faults.clear()
    _broken.clear()


def fault(device: int, what: str) -> None:
    """Break a device: every call to it fails from now on."""
    faults.append(what)
    _broken.setdefault(device, what)


def current_device() -> int | None:
    """Return the device whose context the calling thread has entered last."""
    return getattr(_thread, "device", None)


def enter(device: int | None) -> None:
    _thread.device = device


@contextmanager
def entered(device: int) -> Iterator[None]:
    """Be in a device's context for a while."""
    before = current_device()
    enter(device)
    try:
        yield
    finally:
        enter(before)


def _called(function: str, stream: int | None = None) -> int:
    """Return the device that a call is for, which fails where there is none."""
    device = current_device()
    if device is None:
        raise CudaDriverError(function, "CUDA_ERROR_INVALID_CONTEXT", "")
    if device in _broken:
        raise CudaDriverError(function, "CUDA_ERROR_ILLEGAL_ADDRESS", _broken[device])
    if stream and (stream not in _streams or _streams[stream].device != device):
        raise CudaDriverError(function, "CUDA_ERROR_INVALID_HANDLE", f"stream {stream}")
    return device


# --- memory ---------------------------------------------------------------------------------

_memory = DeviceMemory(fault)


class _Owned:
    def __init__(self) -> None:
        self._is_open = True
        live.add(self)

    def close(self) -> None:
        self._is_open = False
        live.discard(self)


class _Mapped(_Owned):
    """`nbytes` of a file in memory, at an address of its own."""

    def __init__(self, file: int, nbytes: int, device: int | None, memory: object) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._mapping = mmap.mmap(file, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._range = Range(self.address, nbytes, device, memory)
        _memory.add(self._range)

    def close(self) -> None:
        if self._is_open:
            _memory.remove(self._range, type(self).__name__)
            self._mapping.close()
            super().close()
            _called(f"the end of a {type(self).__name__}")


_exported: dict[int, DeviceBuffer] = {}


class DeviceBuffer(_Mapped):
    def __init__(self, nbytes: int) -> None:
        device = _called("cuMemAlloc")
        self.device, self.file = device, os.memfd_create("fake-cuda")
        os.truncate(self.file, nbytes)
        super().__init__(self.file, nbytes, device, self)
        self.buffer_id = next(_numbers)
        _exported[self.buffer_id] = self

    @property
    def _bytes(self) -> ctypes.Array[ctypes.c_uint8]:
        return (ctypes.c_uint8 * self.nbytes).from_address(self.address)

    def ipc_handle(self) -> bytes:
        return _HANDLE.pack(b"fake-ipc", self.buffer_id, self.nbytes)

    def close(self) -> None:
        if self._is_open:
            del _exported[self.buffer_id]
            os.close(self.file)
            super().close()


class MappedHost(_Mapped):
    refused = False
    """Whether the next one cannot be had."""

    def __init__(self, nbytes: int) -> None:
        _called("cuMemHostAlloc")
        if MappedHost.refused:
            MappedHost.refused = False
            raise CudaDriverError("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY", "")
        super().__init__(-1, nbytes, None, self)

    @property
    def device_address(self) -> int:
        return self.address

    def words(self) -> ctypes.Array[ctypes.c_uint64]:
        return (ctypes.c_uint64 * (self.nbytes // 8)).from_address(self.address)


class IpcMapping(_Mapped):
    def __init__(self, handle: bytes) -> None:
        device = _called("cuIpcOpenMemHandle")
        magic, number, nbytes = _HANDLE.unpack(handle)
        buffer = _exported.get(number)
        if magic != b"fake-ipc" or buffer is None or buffer.device != device:
            raise CudaDriverError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE", "no handle")
        super().__init__(buffer.file, nbytes, device, buffer)


class RegisteredHost(_Owned):
    def __init__(
        self, address: int, nbytes: int, *, before_piece: Callable[[], None] | None = None
    ) -> None:
        if before_piece is not None:
            before_piece()
        _called("cuMemHostRegister")
        if _memory.overlaps(address, nbytes):
            code = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
            raise CudaDriverError("cuMemHostRegister", code, f"{nbytes} bytes at {address:#x}")
        super().__init__()
        self.device_address = address
        self._range = Range(address, nbytes, None, self)
        _memory.add(self._range)

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        half = nbytes // 2  # as if two registered pieces met in the middle
        start = self.device_address + offset
        return [(start, half), (start + half, nbytes - half)]

    def close(self) -> None:
        if self._is_open:
            _memory.remove(self._range, "registered memory")
            super().close()
            _called("cuMemHostUnregister")


def _buffer(address: int) -> DeviceBuffer:
    _called("cuPointerGetAttribute")
    for buffer in list(_exported.values()):
        if buffer.address <= address < buffer.address + buffer.nbytes:
            return buffer
    raise CudaDriverError("cuPointerGetAttribute", "CUDA_ERROR_INVALID_VALUE", hex(address))


def allocation(address: int) -> tuple[int, int]:
    buffer = _buffer(address)
    return buffer.address, buffer.nbytes


def buffer_id(address: int) -> int:
    return _buffer(address).buffer_id


def exportable(address: int) -> bool:
    return _buffer(address) is not None


def ipc_handle(address: int) -> bytes:
    return _buffer(address).ipc_handle()


# --- contexts, streams, events --------------------------------------------------------------


class PrimaryContext(_Owned):
    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self.ordinal = ordinal
        self.uuid = UUIDS[ordinal]

    def make_current(self) -> None:
        assert self._is_open, "the context was given up"
        enter(self.ordinal)

    def shared_by_mps(self) -> bool:
        return shared_by_mps

    def total_bytes(self) -> int:
        return TOTAL_BYTES

    def priorities(self) -> tuple[int, int]:
        _called("cuCtxGetStreamPriorityRange")
        return 0, -5


class Stream(_Owned):
    """With a `line`, the work of all streams goes one by one, as where a device has one queue."""

    line: ClassVar[Stream | None] = None

    def __init__(self, priority: int = 0) -> None:
        self.device = _called("cuStreamCreateWithPriority")
        super().__init__()
        self.handle = next(_numbers)
        self._random = random.Random(self.handle)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._left: SimpleQueue[None] = SimpleQueue()  # an item for each piece of work
        self._thread = threading.Thread(target=self._run, name=f"fake-stream-{self.handle}")
        self._thread.start()
        _streams[self.handle] = self

    def put(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._left.get()

        self._left.put(None)
        (Stream.line or self)._work.put(run)

    def done(self) -> bool:
        _called("cuStreamQuery", self.handle)
        return self._left.empty()

    def put_access(self, what: str, accesses: list[Access], work: Callable[[], None]) -> None:
        """Put work that uses memory, which is looked at now and when it is used."""
        if not _memory.check(self.device, accesses, what):
            return

        def run() -> None:
            with _memory.used(self.device, accesses, what) as is_there:
                if is_there and self.device not in _broken:
                    time.sleep(self._random.random() * lag_seconds)
                    work()

        self.put(run)

    def synchronize(self) -> None:
        _called("cuStreamSynchronize", self.handle)
        done = threading.Event()
        self.put(done.set)
        done.wait()
        _called("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        if self.handle in _streams:
            del _streams[self.handle]
            self._work.put(None)
            self._thread.join()
        super().close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            time.sleep(self._random.random() * lag_seconds)
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a kernel does not raise: it breaks the device
                fault(self.device, repr(error))


def stream_of(handle: int, device: int | None = None) -> Stream:
    """Return the stream of that handle; 0 is a device's default stream, the current one's."""
    if handle:
        return _streams[handle]
    number = current_device() if device is None else device
    assert number is not None
    if number not in _default_streams:
        with entered(number):
            made = _default_streams[number] = Stream()
        live.discard(made)  # nobody has to close it
    return _default_streams[number]


class Event(_Owned):
    def __init__(self, *, timed: bool = False, awaited: bool = True) -> None:
        self.device = _called("cuEventCreate")
        super().__init__()
        self.timed = timed
        self.mark = threading.Event()
        self.mark.set()  # what was never recorded counts as passed

    def called(self, function: str, stream: int | None = None) -> None:
        device = _called(function, stream)
        if not self._is_open or (stream is not None and device != self.device):
            raise CudaDriverError(function, "CUDA_ERROR_INVALID_HANDLE", "event")

    def record(self, stream: int) -> None:
        self.called("cuEventRecord", stream)
        self.mark = threading.Event()
        stream_of(stream).put(self.mark.set)

    def done(self) -> bool:
        self.called("cuEventQuery")
        return self.mark.is_set()

    def synchronize(self) -> None:
        self.called("cuEventSynchronize")
        self.mark.wait()


def copy_async(destination: int, source: int, nbytes: int, stream: int) -> None:
    _called("cuMemcpyAsync", stream)
    accesses = [Access(source, nbytes), Access(destination, nbytes, writes=True)]
    stream_of(stream).put_access(
        "a copy", accesses, lambda: ctypes.memmove(destination, source, nbytes)
    )


def wait_event(stream: int, event: Event) -> None:
    _called("cuStreamWaitEvent", stream)
    event.called("cuStreamWaitEvent")
    mark = event.mark
    stream_of(stream).put(mark.wait)


def wait_value(stream: int, address: int, value: int) -> None:
    device = _called("cuStreamWaitValue64", stream)
    counter = ctypes.c_uint64.from_address(address)

    def wait() -> None:
        while counter.value < value and device not in _broken:
            time.sleep(POLL_SECONDS)

    stream_of(stream).put_access("a wait", [Access(address, 8, waits=True)], wait)


def write_value(stream: int, address: int, value: int) -> None:
    _called("cuStreamWriteValue64", stream)
    counter = ctypes.c_uint64.from_address(address)
    stream_of(stream).put_access(
        "a write", [Access(address, 8, writes=True)], lambda: setattr(counter, "value", value)
    )


def elapsed_seconds(begin: Event, end: Event) -> float:
    for event in (begin, end):
        event.called("cuEventElapsedTime")
        if not event.timed or not event.mark.is_set():
            raise CudaDriverError("cuEventElapsedTime", "CUDA_ERROR_NOT_READY", "event")
    return 0.001


# --- the codec ------------------------------------------------------------------------------


class CudaCodec:
    """The host's codec, as steps on a stream. `broken` makes the encode after so many fail."""

    broken: ClassVar[int | None] = None
    prepared: ClassVar[set[ancf.DType]] = set()

    def __init__(self, ordinal: int) -> None:
        self._host = ancf.host_backend()

    def scratch_bytes(self, nbytes: int, dtype: ancf.DType) -> int:
        return 64

    def encode_async(
        self, src, nbytes, dtype, dst, dst_bytes, scratch, size_ptr, stream, *, mode="auto",
        likely=None,
    ) -> None:  # fmt: skip
        self._start(stream)
        assert not dst % ALIGNMENT
        assert not scratch % ALIGNMENT
        words = (ctypes.c_uint64 * 3).from_address(size_ptr)

        def encode() -> None:
            words[0] = self._host.encode_into(src, nbytes, dtype, dst, dst_bytes, mode=mode)
            if likely not in (None, blob_kind(ctypes.string_at(dst, KIND_BYTES)).pipeline):
                words[0] = self._host.encode_into(src, nbytes, dtype, dst, dst_bytes, mode="raw")
            words[1] = 0
            words[2] = ctypes.c_uint8.from_address(dst + 6).value

        accesses = [
            Access(src, nbytes),
            *writes_to((dst, dst_bytes), (scratch, 64), (size_ptr, 24)),
        ]
        stream_of(stream).put_access("an encoder", accesses, encode)

    def _start(self, stream) -> None:
        if CudaCodec.broken is not None:
            CudaCodec.broken = CudaCodec.broken - 1 if CudaCodec.broken else None
            if CudaCodec.broken is None:
                raise KernelsError("this encoder does not start")
        _called("cuLaunchKernel", stream)

    check_blocks = 3

    def check_async(self, spans, count, sums, stream) -> None:
        self._start(stream)
        words = (ctypes.c_uint64 * (2 * count)).from_address(spans)
        found = (ctypes.c_uint64 * (self.check_blocks * count)).from_address(sums)
        parts = [(words[2 * number], words[2 * number + 1]) for number in range(count)]

        def check() -> None:
            for number, (address, nbytes) in enumerate(parts):
                data = np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)
                found[self.check_blocks * number] = checksum(data) - nbytes * CHECK_LENGTH - 5
                found[self.check_blocks * number + 1] = 2
                found[self.check_blocks * number + 2] = 3

        accesses = [Access(spans, 16 * count), *(Access(*part) for part in parts)]
        stream_of(stream).put_access(
            "checksums", [*accesses, *writes_to((sums, len(bytes(found))))], check
        )

    def prepare_each(self, dtypes, *, modes=("auto",)) -> Iterator[ancf.DType]:
        for dtype in dtypes:
            CudaCodec.prepared.add(dtype)
            yield dtype

    def decode_async(
        self, blob, blob_bytes, dst, dst_bytes, scratch, status_ptr, stream, *, dtype, pipeline
    ) -> None:
        assert dtype in CudaCodec.prepared
        assert pipeline in PIPELINES
        _called("cuLaunchKernel", stream)
        assert not blob % ALIGNMENT
        assert not scratch % ALIGNMENT
        status = ctypes.c_uint64.from_address(status_ptr)

        def decode() -> None:
            try:
                self._host.decode_into(blob, blob_bytes, dst, dst_bytes)
                status.value = 0
            except CorruptBlob:
                status.value = 7

        written = writes_to((dst, dst_bytes), (scratch, 64), (status_ptr, 8))
        stream_of(stream).put_access("a decoder", [Access(blob, blob_bytes), *written], decode)

    def explain(self, status: int) -> str:
        return f"damage number {status}"


@contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> Iterator[None]:
    """Have modules of these names imported on the fake devices, and afterwards as ever.

    Then nothing of the devices is left, and nothing has used what it must not.
    """
    repair()
    enter(None)
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    places = [name.rpartition(".") for name in names]
    for package, _, leaf in places:
        monkeypatch.delitem(sys.modules, f"{package}.{leaf}", raising=False)
        monkeypatch.delattr(import_module(package), leaf, raising=False)
    try:
        yield
        assert not faults
        assert not live
    finally:
        while _default_streams:
            _default_streams.popitem()[1].close()
        enter(None)
        for package, _, leaf in places:
            if sys.modules.pop(f"{package}.{leaf}", None) is not None:
                delattr(import_module(package), leaf)


def modules() -> dict[str, ModuleType]:
    """Return the modules that this stands in for, by the names they are imported under."""
    from support import fake_virtual_memory as virtual

    driver = ModuleType("storm_kernels.cuda_driver")
    for kind in (
        PrimaryContext, Stream, Event, DeviceBuffer, MappedHost, IpcMapping, RegisteredHost,
        copy_async, wait_event, wait_value, write_value, elapsed_seconds, ipc_handle,
        virtual.AddressRange, virtual.allocation, virtual.buffer_id, virtual.exportable,
        virtual.holds, virtual.is_shareable, virtual.release_piece, virtual.reserved_range,
        virtual.retain_piece, virtual.share_piece,
    ):  # fmt: skip
        setattr(driver, kind.__name__, kind)
    codec = ModuleType("storm_kernels.ancf.cuda")
    codec.CudaCodec = CudaCodec
    return {"storm_kernels.cuda_driver": driver, "storm_kernels.ancf.cuda": codec}
