"""Times of the codec's kernels apart, for work on them; run it under ncu for more.

python tests/bench/codec_gpu_profile.py [PART OF A ROW'S NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from storm_kernels.ancf.cuda import CudaCodec

sys.path.insert(0, str(Path(__file__).parent))
import codec_gpu

TIMES = 3


def main() -> None:
    for case in codec_gpu.CASES:
        if not any(part in case.name for part in sys.argv[1:] or [""]):
            continue
        job = codec_gpu.Job(CudaCodec(), case.make(512 << 20), case.speed, checksum=True)
        job.check()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(TIMES):
                job.encode()
                job.decode()
            torch.cuda.synchronize()
        for event in profile.key_averages():
            if event.key.startswith("ancf"):
                print(
                    f"{case.name:26} {event.key:20} {event.device_time_total / event.count:8.1f} us"
                )


if __name__ == "__main__":
    main()
