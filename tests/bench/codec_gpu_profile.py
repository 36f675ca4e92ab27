"""Times of the codec's kernels apart, for work on them; run it under ncu for more.

python tests/bench/codec_gpu_profile.py [PART OF A ROW'S NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from codec_gpu_cases import CASES, MIB
from codec_gpu_job import Job
from storm_kernels.ancf.cuda import CudaCodec

TIMES = 5


def kernel_microseconds(action: Callable[[], object]) -> dict[str, float]:
    """Return the mean time on the GPU of each codec kernel that `action` launches, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TIMES):
            action()
        torch.cuda.synchronize()
    return {
        event.key: event.device_time_total / event.count
        for event in profile.key_averages()
        if event.key.startswith("ancf")
    }


def main() -> None:
    for case in CASES:
        if not any(part in case.name for part in sys.argv[1:] or [""]):
            continue
        job = Job(CudaCodec(), case.make(512 * MIB), case.speed, checksum=True)
        job.check()
        for action in (job.encode, job.decode):
            for kernel, time in kernel_microseconds(action).items():
                print(f"{case.name:24} {kernel:20} {time:8.1f} us")


if __name__ == "__main__":
    main()
