"""What the client uses of PyTorch's CUDA, on the fake devices.

What stays true: the current device is that of the context which the calling thread has entered, as
in CUDA's runtime, and asking for the one that is current already enters nothing. An event is of the
device on whose stream it is recorded first.

What PyTorch allows is an error here where it takes a thread's current device for granted: questions
about a device's memory that do not name it, and what would make a context on a device that nothing
lies on.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from storm_kernels.errors import CudaDriverError
from support import fake_cuda
from support.fake_virtual_memory import ExpandableSegment


def ordinal_of(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index


class FakeEvent:
    """`torch.cuda.Event`: made on the device that it is recorded on."""

    def __init__(self, torch: FakeTorch, *, enable_timing: bool = False) -> None:
        self._torch = torch
        self._timed = enable_timing
        self.event: fake_cuda.Event | None = None

    @property
    def _made(self) -> fake_cuda.Event:
        assert self.event is not None, "was never recorded"
        return self.event

    def record(self, stream: SimpleNamespace | None = None) -> None:
        chosen = self._torch.current_stream() if stream is None else stream
        with fake_cuda.entered(chosen.device):
            if self.event is None:
                self.event = fake_cuda.Event(timed=self._timed)
                self._torch.owns(self.event)
            self.event.record(chosen.cuda_stream)

    def query(self) -> bool:
        with fake_cuda.entered(self._made.device):
            return self._made.done()

    def synchronize(self) -> None:
        with fake_cuda.entered(self._made.device):
            self._made.synchronize()

    def elapsed_time(self, end: FakeEvent) -> float:
        if self._made.device != end._made.device:
            name, code = "cudaEventElapsedTime", "CUDA_ERROR_INVALID_HANDLE"
            raise CudaDriverError(name, code, "invalid resource handle")
        with fake_cuda.entered(self._made.device):
            return fake_cuda.elapsed_seconds(self._made, end._made) * 1e3


class FakeTensor:
    """`nbytes` of a device's memory, its own; notes what streams it is recorded on."""

    def __init__(self, nbytes: int, device: int, *, expandable: bool = False) -> None:
        self.buffer: fake_cuda.DeviceBuffer | ExpandableSegment
        with fake_cuda.entered(device):
            if expandable:
                size = -nbytes % mmap.PAGESIZE + nbytes
                self.buffer = ExpandableSegment(2 * size)
                self.buffer.map(0, size)
            else:
                self.buffer = fake_cuda.DeviceBuffer(max(1, nbytes))
        self.device = device
        self.recorded: list[int] = []

    def data_ptr(self) -> int:
        return self.buffer.address

    def fill(self, byte: int) -> None:
        self.buffer._bytes[:] = [byte] * self.buffer.nbytes

    def read(self) -> bytes:
        return bytes(self.buffer._bytes)

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.cuda_stream)

    def close(self) -> None:
        with fake_cuda.entered(self.device):
            self.buffer.close()


class _View:
    """An empty tensor, over whatever storage it is set to."""

    def set_(self, storage: FakeTensor) -> FakeTensor:
        return storage


class FakeTorch:
    """Stands for the module. Each thread has the stream of a device that `stream` says, or one."""

    device = torch.device
    uint8 = torch.uint8

    def __init__(self) -> None:
        self.cuda = self
        self._C = SimpleNamespace(
            _cuda_getCurrentRawStream=self._raw_stream,
            _cuda_getDevice=self.current_device,
            _cuda_hasPrimaryContext=lambda ordinal: ordinal in self.contexts,
        )
        self._chosen = threading.local()
        self._made: list[FakeTensor | fake_cuda.Event] = []
        self.contexts: set[int] = set()
        """Devices that something lies on."""
        self.capturing: set[int] = set()
        self.memory: dict[int, dict[str, int]] = {}
        """What a device tells of itself, by the names of PyTorch's functions."""
        self.given_back = 0
        self.expandable = False
        """Whether tensors lie in expandable segments from now on, each in one of its own."""

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        return self.tensor(nbytes, device.index) if nbytes else _View()

    def tensor(self, nbytes: int, device: int = 0) -> FakeTensor:
        made = FakeTensor(nbytes, device, expandable=self.expandable)
        self._made.append(made)
        self.contexts.add(device)
        return made

    def owns(self, event: fake_cuda.Event) -> None:
        """Close it at the end."""
        self._made.append(event)

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, enable_timing=enable_timing)

    def init(self) -> None:
        pass

    def current_device(self) -> int:
        return fake_cuda.current_device() or 0

    def get_device_properties(self, device: torch.device | int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << (30 + ordinal_of(device)))

    def is_initialized(self) -> bool:
        return bool(self.contexts)

    def device_count(self) -> int:
        return len(fake_cuda.UUIDS)

    def is_current_stream_capturing(self) -> bool:
        device = self.current_device()
        assert device in self.contexts, f"makes a context on device {device}"
        return device in self.capturing

    def mem_get_info(self, device: torch.device | int) -> tuple[int, int]:
        return self.memory[ordinal_of(device)]["free"], 1 << 30

    def memory_reserved(self, device: torch.device | int) -> int:
        return self.memory[ordinal_of(device)]["reserved"]

    def memory_allocated(self, device: torch.device | int) -> int:
        return self.memory[ordinal_of(device)]["allocated"]

    def max_memory_allocated(self, device: torch.device | int) -> int:
        return self.memory[ordinal_of(device)]["most"]

    def memory_stats_as_nested_dict(self, device: torch.device | int) -> dict[str, Any]:
        found = self.memory[ordinal_of(device)]
        figures = {"current": found["allocated"], "peak": found["most"]}
        return {"allocated_bytes": {"all": figures}}

    def empty_cache(self) -> None:
        self.given_back += 1

    @contextmanager
    def in_device(self, device: torch.device | int) -> Iterator[None]:
        before, ordinal = self.current_device(), ordinal_of(device)
        if before != ordinal:
            fake_cuda.enter(ordinal)
        yield
        if self.current_device() != before:
            fake_cuda.enter(before)

    @contextmanager
    def in_stream(self, stream: fake_cuda.Stream) -> Iterator[None]:
        self._chosen.stream = stream
        yield
        del self._chosen.stream

    def current_stream(self, device: torch.device | int | None = None) -> SimpleNamespace:
        ordinal = self.current_device() if device is None else ordinal_of(device)
        return SimpleNamespace(cuda_stream=self._raw_stream(ordinal), device=ordinal)

    def _raw_stream(self, ordinal: int) -> int:
        chosen = getattr(self._chosen, "stream", None)
        return chosen.handle if chosen is not None and chosen.device == ordinal else 0

    def stream_of(self, ordinal: int) -> fake_cuda.Stream:
        """Return the stream that is current in this thread."""
        return fake_cuda.stream_of(self._raw_stream(ordinal), ordinal)

    def close(self) -> None:
        for owned in self._made:
            with fake_cuda.entered(ordinal_of(owned.device)):
                owned.close()


class FakeTorchCuda:
    """`torch.cuda` itself, whose `device` is not that of `torch`."""

    def __init__(self, torch: FakeTorch) -> None:
        self._torch = torch
        self.device = torch.in_device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


def fake_torch() -> FakeTorch:
    made = FakeTorch()
    made.cuda = FakeTorchCuda(made)
    return made


def faked(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> FakeTorch:
    """Have modules find the fake devices for PyTorch; close it where anything was made."""
    made = fake_torch()
    for module in modules:
        monkeypatch.setattr(module, "torch", made)
    return made
