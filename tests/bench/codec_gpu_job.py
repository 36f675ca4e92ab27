"""One tensor with all the memory that coding it on the GPU takes, and how long an action takes.

What stays true: `check` has decoded the blob to the original bits before anything is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from storm_kernels.ancf import DType, max_encoded_bytes
from storm_kernels.ancf.cuda import CudaCodec
from storm_kernels.ancf.cuda_launches import KIND_BYTES, blob_kind
from storm_kernels.ancf.dtypes import dtype_of

HEAD_START_CYCLES = 500_000  # the device waits this long first, so that launches are never late
WARM_UP = 3
PROFILED = 5
POISON = 0xA5


def milliseconds(action: Callable[[], object], repeat: int) -> float:
    """Median time of `action` on the current stream, between two CUDA events."""
    times = []
    for _ in range(WARM_UP):
        action()
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernel_microseconds(action: Callable[[], object]) -> dict[str, float]:
    """Return the mean time on the GPU of each codec kernel that `action` launches, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            action()
        torch.cuda.synchronize()
    return {
        event.key: event.device_time_total / event.count
        for event in profile.key_averages()
        if event.key.startswith("ancf")
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Job:
    """Encodes and decodes one tensor with `codec`, on torch's current stream."""

    def __init__(
        self, codec: CudaCodec, tensor: torch.Tensor, speed: str, *, checksum: bool
    ) -> None:
        self.codec, self.tensor, self.speed, self.checksum = codec, tensor, speed, checksum
        self.dtype: DType = dtype_of(tensor.dtype)
        room = max_encoded_bytes(tensor.nbytes, self.dtype)
        self.blob = torch.empty(room, dtype=torch.uint8, device="cuda")
        scratch = codec.scratch_bytes(tensor.nbytes, self.dtype)
        self.scratch = torch.empty(scratch, dtype=torch.uint8, device="cuda")
        self.result = torch.zeros(3, dtype=torch.int64, device="cuda")
        self.out = torch.empty_like(tensor)
        self.out.view(torch.uint8).fill_(POISON)

    def encode(self) -> None:
        self.codec.encode_async(
            self.tensor.data_ptr(), self.tensor.nbytes, self.dtype, self.blob.data_ptr(),
            self.blob.numel(), self.scratch.data_ptr(), self.result.data_ptr(),
            torch.cuda.current_stream().cuda_stream, speed=self.speed, checksum=self.checksum,
        )  # fmt: skip

    def decode(self) -> None:
        self.codec.decode_async(
            self.blob.data_ptr(), self.size, self.out.data_ptr(), self.out.nbytes,
            self.scratch.data_ptr(), self.result.data_ptr(),
            torch.cuda.current_stream().cuda_stream, dtype=self.dtype, pipeline=self.pipeline,
        )  # fmt: skip

    def check(self) -> None:
        """Encode and decode once; set `size`, `mode` and `pipeline`."""
        self.encode()
        self.size, _, self.mode = (int(word) for word in self.result.cpu())
        self.pipeline = blob_kind(bytes(self.blob[:KIND_BYTES].tolist())).pipeline
        self.decode()
        if status := int(self.result[0]):
            sys.exit(f"decoding failed: {self.codec.explain(status)}")
        if not same_bits(self.out, self.tensor):
            sys.exit("the decoded bits differ")
