"""A GPU made of host memory and threads, with the calls that the cuda lane uses.

What stays true: a stream does its work in order in a thread of its own, nothing is done before
its turn, and waits on counters are real: what would hang on a device hangs here.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from queue import SimpleQueue
from types import ModuleType
from typing import ClassVar

from storm_kernels import ancf
from storm_kernels.ancf.cuda_launches import PIPELINES
from storm_kernels.errors import CorruptBlob, CudaDriverError, KernelsError

UUID = "00000000-0000-0000-0000-00000000f4ce"
POLL_SECONDS = 0.0005

_HANDLE = struct.Struct("<8sQQ40x")
_streams: dict[int, Stream] = {}
_numbers = count(1)
live: set[object] = set()
"""Everything that was made and not closed."""


class _Owned:
    def __init__(self) -> None:
        live.add(self)

    def close(self) -> None:
        live.discard(self)


class PrimaryContext(_Owned):
    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self.ordinal = ordinal
        self.uuid = UUID

    def make_current(self) -> None:
        pass

    def priorities(self) -> tuple[int, int]:
        return 0, -5


class Stream(_Owned):
    def __init__(self, priority: int = 0) -> None:
        super().__init__()
        self.handle = next(_numbers)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"fake-stream-{self.handle}")
        self._thread.start()
        _streams[self.handle] = self

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        done = threading.Event()
        self.put(done.set)
        done.wait()

    def close(self) -> None:
        if self.handle in _streams:
            del _streams[self.handle]
            self._work.put(None)
            self._thread.join()
        super().close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class Event(_Owned):
    def __init__(self, *, timed: bool = False, awaited: bool = True) -> None:
        super().__init__()
        self.mark = threading.Event()

    def record(self, stream: int) -> None:
        self.mark = threading.Event()
        _streams[stream].put(self.mark.set)

    def done(self) -> bool:
        return self.mark.is_set()

    def synchronize(self) -> None:
        self.mark.wait()


class _Memory(_Owned):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self._bytes = (ctypes.c_uint8 * nbytes)()
        self.address = ctypes.addressof(self._bytes)


class DeviceBuffer(_Memory):
    def ipc_handle(self) -> bytes:
        return _HANDLE.pack(b"fake-ipc", self.address, self.nbytes)


class MappedHost(_Memory):
    @property
    def device_address(self) -> int:
        return self.address

    def words(self) -> ctypes.Array[ctypes.c_uint64]:
        return (ctypes.c_uint64 * (self.nbytes // 8)).from_address(self.address)


class IpcMapping(_Owned):
    def __init__(self, handle: bytes) -> None:
        magic, self.address, self.nbytes = _HANDLE.unpack(handle)
        if magic != b"fake-ipc":
            raise CudaDriverError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE", "no handle")
        super().__init__()


class RegisteredHost(_Owned):
    def __init__(self, address: int, nbytes: int) -> None:
        super().__init__()
        self.device_address = address

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        half = nbytes // 2  # as if two registered pieces met in the middle
        start = self.device_address + offset
        return [(start, half), (start + half, nbytes - half)]


def copy_async(destination: int, source: int, nbytes: int, stream: int) -> None:
    _streams[stream].put(lambda: ctypes.memmove(destination, source, nbytes))


def wait_event(stream: int, event: Event) -> None:
    mark = event.mark
    _streams[stream].put(mark.wait)


def wait_value(stream: int, address: int, value: int) -> None:
    counter = ctypes.c_uint64.from_address(address)

    def wait() -> None:
        while counter.value < value:
            time.sleep(POLL_SECONDS)

    _streams[stream].put(wait)


def write_value(stream: int, address: int, value: int) -> None:
    counter = ctypes.c_uint64.from_address(address)
    _streams[stream].put(lambda: setattr(counter, "value", value))


def elapsed_seconds(begin: Event, end: Event) -> float:
    return 0.001


class CudaCodec:
    """The host's codec, as steps on a stream. `broken` makes the next encode fail to start."""

    broken = False
    prepared: ClassVar[set[ancf.DType]] = set()

    def __init__(self, ordinal: int) -> None:
        self._host = ancf.host_backend()

    def scratch_bytes(self, nbytes: int, dtype: ancf.DType) -> int:
        return 64

    def encode_async(
        self, src, nbytes, dtype, dst, dst_bytes, scratch, size_ptr, stream, *, mode="auto"
    ) -> None:
        if CudaCodec.broken:
            CudaCodec.broken = False
            raise KernelsError("this encoder does not start")
        words = (ctypes.c_uint64 * 3).from_address(size_ptr)

        def encode() -> None:
            words[0] = self._host.encode_into(src, nbytes, dtype, dst, dst_bytes, mode=mode)
            words[1] = 0
            words[2] = ctypes.c_uint8.from_address(dst + 6).value

        _streams[stream].put(encode)

    def prepare_each(self, dtypes, *, modes=("auto",)) -> Iterator[ancf.DType]:
        for dtype in dtypes:
            CudaCodec.prepared.add(dtype)
            yield dtype

    def decode_async(
        self, blob, blob_bytes, dst, dst_bytes, scratch, status_ptr, stream, *, dtype, pipeline
    ) -> None:
        assert dtype in CudaCodec.prepared
        assert pipeline in PIPELINES
        status = ctypes.c_uint64.from_address(status_ptr)

        def decode() -> None:
            try:
                self._host.decode_into(blob, blob_bytes, dst, dst_bytes)
                status.value = 0
            except CorruptBlob:
                status.value = 7

        _streams[stream].put(decode)

    def explain(self, status: int) -> str:
        return f"damage number {status}"


def modules() -> dict[str, ModuleType]:
    """Return the modules that this stands in for, by the names they are imported under."""
    driver = ModuleType("storm_kernels.cuda_driver")
    for kind in (
        PrimaryContext, Stream, Event, DeviceBuffer, MappedHost, IpcMapping, RegisteredHost,
        copy_async, wait_event, wait_value, write_value, elapsed_seconds,
    ):  # fmt: skip
        setattr(driver, kind.__name__, kind)
    codec = ModuleType("storm_kernels.ancf.cuda")
    codec.CudaCodec = CudaCodec
    return {"storm_kernels.cuda_driver": driver, "storm_kernels.ancf.cuda": codec}
