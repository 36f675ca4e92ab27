"""What the client's cuda lane uses of PyTorch, on the fake devices.

What stays true: the current device is that of the context which the calling thread has entered, as
in CUDA's runtime, and asking for the one that is current already enters nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from support import fake_cuda


class FakeTensor:
    """`nbytes` of a device's memory, its own; notes what streams it is recorded on."""

    def __init__(self, nbytes: int, device: int) -> None:
        with fake_cuda.entered(device):
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
            _cuda_getCurrentRawStream=self._raw_stream, _cuda_getDevice=self.current_device
        )
        self._chosen = threading.local()
        self._made: list[FakeTensor] = []

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Any:
        return self.tensor(nbytes, device.index) if nbytes else _View()

    def tensor(self, nbytes: int, device: int = 0) -> FakeTensor:
        self._made.append(FakeTensor(nbytes, device))
        return self._made[-1]

    def init(self) -> None:
        pass

    def current_device(self) -> int:
        return fake_cuda.current_device() or 0

    def get_device_properties(self, ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def is_current_stream_capturing(self) -> bool:
        return False

    @contextmanager
    def in_device(self, ordinal: int) -> Iterator[None]:
        before = self.current_device()
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

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=self._raw_stream(self.current_device()))

    def _raw_stream(self, ordinal: int) -> int:
        return self._chosen.stream.handle if hasattr(self._chosen, "stream") else 0

    def stream_of(self, ordinal: int) -> fake_cuda.Stream:
        """Return the stream that is current in this thread."""
        return fake_cuda.stream_of(self._raw_stream(ordinal), ordinal)

    def close(self) -> None:
        for owned in self._made:
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
