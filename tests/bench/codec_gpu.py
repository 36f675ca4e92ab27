"""Speed and ratio of the CUDA codec on one GPU, as a table and as JSON.

    python tests/bench/codec_gpu.py [--mib 512] [--repeat 15] [--output FILE]

Times are medians between CUDA events around one encode (all its launches) or one decode; GB/s
count original bytes. What stays true: every timed blob was decoded to the original bits first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import cupy
import torch
from storm_kernels.ancf import DType, max_encoded_bytes
from storm_kernels.ancf.cuda import CudaCodec
from storm_kernels.ancf.dtypes import dtype_of

MIB = 1 << 20
HEAD_START_CYCLES = 500_000  # the device waits this long first, so that launches are never late


@dataclass(frozen=True)
class Case:
    """One row: a tensor and its goals (ratio, encode and decode in GB/s)."""

    name: str
    make: Callable[[int], torch.Tensor]
    speed: str = "fast"
    ratio: float = 0.0
    encode: float = 0.0
    decode: float = 0.0


def normal(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n // dtype.itemsize, device="cuda").to(dtype)


def relu(n: int) -> torch.Tensor:
    return torch.randn(n // 2, device="cuda").relu_().to(torch.bfloat16)


def mostly_zero(n: int) -> torch.Tensor:
    values = torch.randn(n // 2, device="cuda")
    return torch.where(values > 0.6744898, values, 0).to(torch.bfloat16)  # N(0, 1)'s upper quartile


def dropped_out(n: int) -> torch.Tensor:
    values = torch.randn(n // 2, device="cuda")
    return torch.where(torch.rand(n // 2, device="cuda") < 0.25, values, 0).to(torch.bfloat16)


def mask(n: int) -> torch.Tensor:
    return torch.rand(n, device="cuda") < 0.1


def bf16_in_fp32(n: int) -> torch.Tensor:
    return torch.randn(n // 4, device="cuda").to(torch.bfloat16).float()


def noise(n: int) -> torch.Tensor:
    return torch.randint(0, 1 << 62, (n // 8,), device="cuda").mul_(2).view(torch.bfloat16)


CASES = [
    Case("bf16 N(0,1) fast", normal(torch.bfloat16), "fast", 1.42, 1800, 2200),
    Case("bf16 N(0,1) dense", normal(torch.bfloat16), "dense", 1.48, 1000, 1500),
    Case("fp16 N(0,1) fast", normal(torch.float16), "fast", 1.12, 1500, 1800),
    Case("fp16 N(0,1) dense", normal(torch.float16), "dense", 1.16, 900, 1200),
    Case("fp32 N(0,1) fast", normal(torch.float32), "fast", 1.17, 1500, 1800),
    Case("fp32 N(0,1) dense", normal(torch.float32), "dense", 1.19, 900, 1200),
    Case("bf16 ReLU, 50% zeros", relu, "fast", 2.5, 1000, 1200),
    Case("bf16 no sign, 75% zeros", mostly_zero, "fast", 4.4, 1000, 1200),
    Case("bf16 signed, 75% zeros", dropped_out, "fast"),
    Case("bool p = 0.1", mask, "fast", 7.99, 1500, 1500),
    Case("fp32 holding bf16", bf16_in_fp32, "fast", 2.8, 1500, 1500),
    Case("random bits", noise, "fast", 0.995),
]


def milliseconds(action: Callable[[], None], repeat: int) -> float:
    """Median time of `action` on the current stream."""
    times = []
    for _ in range(3):
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


class Job:
    """One tensor with all the memory that coding it takes."""

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
        self.out.view(torch.uint8).fill_(0xA5)

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
            torch.cuda.current_stream().cuda_stream, dtype=self.dtype,
        )  # fmt: skip

    def check(self) -> None:
        """Encode and decode once; set `size` and `mode`."""
        self.encode()
        self.size, _, self.mode = (int(word) for word in self.result.cpu())
        self.decode()
        if status := int(self.result[0]):
            sys.exit(f"decoding failed: {self.codec.explain(status)}")
        same = torch.equal(self.out.view(torch.uint8), self.tensor.view(torch.uint8))
        if not same:
            sys.exit("the decoded bits differ")


def measure(
    codec: CudaCodec, tensor: torch.Tensor, speed: str, repeat: int, *, checksum: bool
) -> dict:
    job = Job(codec, tensor, speed, checksum=checksum)
    job.check()
    gigabytes = tensor.nbytes / 1e6  # a millisecond
    return {
        "mode": job.mode,
        "ratio": round(tensor.nbytes / job.size, 4),
        "encode_gbps": round(gigabytes / milliseconds(job.encode, repeat), 1),
        "decode_gbps": round(gigabytes / milliseconds(job.decode, repeat), 1),
    }


def table(nbytes: int, repeat: int, only: str) -> list[dict]:
    codec, rows = CudaCodec(), []
    for case in CASES:
        if only not in case.name:
            continue
        tensor = case.make(nbytes)
        row = {"tensor": case.name, "asked": asdict(case) | {"make": None}}
        row |= measure(codec, tensor, case.speed, repeat, checksum=True)
        row["without_checksum"] = measure(codec, tensor, case.speed, repeat, checksum=False)
        rows.append(row)
        plain = row["without_checksum"]
        both = [
            f"{way} {row[f'{way}_gbps']:6.0f} ({asked:4.0f}) {plain[f'{way}_gbps']:6.0f} plain"
            for way, asked in (("encode", case.encode), ("decode", case.decode))
        ]
        ratio = f"mode {row['mode']} ratio {row['ratio']:7.3f} ({case.ratio:5.2f})"
        print(f"{case.name:26} {ratio}  {'  '.join(both)}", flush=True)
    return rows


def by_blocks(nbytes: int, repeat: int) -> list[dict]:
    tensor, rows = normal(torch.bfloat16)(nbytes), []
    for blocks in (4, 8, 16, 32, 64):
        row = {"blocks": blocks} | measure(
            CudaCodec(blocks=blocks), tensor, "fast", repeat, checksum=True
        )
        rows.append(row)
        speeds = f"encode {row['encode_gbps']:6.0f}, decode {row['decode_gbps']:6.0f} GB/s"
        print(f"{blocks:3} blocks: {speeds}")
    return rows


def beside_gemm(repeat: int) -> list[dict]:
    """Slowdown of a large matrix product beside encoders held to link rate."""
    n, link = 8192, 55e9
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    products = 12

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, b, out=c)

    alone = milliseconds(multiply, repeat)
    rows = [{"blocks": 0, "gemm_ms": alone / products, "relative_speed": 1.0}]
    side, tensor = torch.cuda.Stream(), normal(torch.bfloat16)(64 * MIB)
    for blocks in (4, 8, 16):
        job = Job(CudaCodec(blocks=blocks), tensor, "fast", checksum=True)
        job.check()
        own = milliseconds(job.encode, repeat)
        times = max(1, round(alone / 1e3 * link * 1.42 / tensor.nbytes))
        rest_cycles = int(max(0.0, alone / times - own) * 1.5e6)

        def together(job: Job = job, times: int = times, rest: int = rest_cycles) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(times):
                    job.encode()
                    torch.cuda._sleep(rest)
            multiply()

        def timed(job: Job = job) -> float:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            together()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end)

        shared = statistics.median(timed() for _ in range(repeat))
        rows.append({
            "blocks": blocks, "encodes": times, "gemm_ms": shared / products,
            "relative_speed": round(alone / shared, 4),
        })  # fmt: skip
        print(
            f"GEMM beside {times} encodes of 64 MiB on {blocks} blocks: "
            f"{alone / shared:.4f} of its speed"
        )
    return rows


def machine() -> dict[str, str]:
    """Return what the figures depend on beside this script."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cupy": cupy.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--only", default="", help="part of a row's name")
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    nbytes = options.mib * MIB
    found = {
        "machine": machine(),
        "command": sys.argv,
        "mib": options.mib,
        "table": table(nbytes, options.repeat, options.only),
    }
    if not options.table_only:
        found["by_blocks"] = by_blocks(nbytes, options.repeat)
        found["beside_gemm"] = beside_gemm(options.repeat)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
