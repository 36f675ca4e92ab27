"""Speed and ratio of the CUDA codec on one GPU, its peers in the same run, as tables and as JSON.

    python tests/bench/codec_gpu.py [--mib 512] [--repeat 15] [--parts table,sizes,peers,blocks]
        [--dietgpu LIBRARY] [--splitzip FILE] [--json FILE]

Times are medians between CUDA events around one encode (all its launches) or one decode; GB/s
count original bytes. What stays true: every timed blob was decoded to the original bits first.
codec_gpu_peers.py says how the peers come here; one that is missing is skipped with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from codec_gpu_cases import BF16, CASES, MIB, Case
from codec_gpu_job import Job, kernel_microseconds, milliseconds
from codec_gpu_peers import peer_table
from recording import parser_of, record
from storm_kernels import backends
from storm_kernels.ancf.cuda import CudaCodec

PARTS = ("table", "sizes", "peers", "blocks")
BLOCKS = (4, 8, 16, 32, 64)
SIZES = (1, 4, 8, 16, 32, 64, 128, 256)  # MiB: a daemon's parts


def measure(job: Job, repeat: int) -> dict:
    """Return one job's ratio and speeds."""
    job.check()
    megabytes = job.tensor.nbytes / 1e6  # GB/s times milliseconds
    return {
        "mode": job.mode,
        "ratio": round(job.tensor.nbytes / job.size, 4),
        "encode_gbps": round(megabytes / milliseconds(job.encode, repeat), 1),
        "decode_gbps": round(megabytes / milliseconds(job.decode, repeat), 1),
    }


def row_of(codec: CudaCodec, case: Case, nbytes: int, repeat: int) -> dict:
    """Measure one case with the checksum and without, and show it."""
    tensor = case.make(nbytes)
    job = Job(codec, tensor, case.speed, checksum=True)
    row = {"tensor": case.name, "asked": asdict(case) | {"make": None}} | measure(job, repeat)
    row["choose_us"] = round(kernel_microseconds(job.encode).get("ancf_choose", 0.0), 2)
    plain = measure(Job(codec, tensor, case.speed, checksum=False), repeat)
    row["without_checksum"] = plain
    both = [
        f"{way} {row[f'{way}_gbps']:6.0f} ({asked:4.0f}) {plain[f'{way}_gbps']:6.0f} plain"
        for way, asked in (("encode", case.encode), ("decode", case.decode))
    ]
    ratio = f"mode {row['mode']} ratio {row['ratio']:7.3f} ({case.ratio:5.2f})"
    print(
        f"{case.name:24} {ratio}  {'  '.join(both)}  choice {row['choose_us']:5.2f} us", flush=True
    )
    return row


def table(nbytes: int, repeat: int) -> list[dict]:
    """Measure every case."""
    codec = CudaCodec()
    return [row_of(codec, case, nbytes, repeat) for case in CASES]


def by_size(repeat: int) -> list[dict]:
    """Measure bfloat16 N(0,1) in parts: what a call costs beside its bytes."""
    codec = CudaCodec()
    return rows_by("mib", ((mib, codec, BF16(mib * MIB)) for mib in SIZES), repeat)


def by_blocks(nbytes: int, repeat: int) -> list[dict]:
    """Measure bfloat16 N(0,1) with few thread blocks: what it takes to serve the link."""
    tensor = BF16(nbytes)
    return rows_by("blocks", ((n, CudaCodec(blocks=n), tensor) for n in BLOCKS), repeat)


def rows_by(
    what: str, jobs: Iterable[tuple[int, CudaCodec, torch.Tensor]], repeat: int
) -> list[dict]:
    """Measure each tensor with its codec, and show the rows by their numbers of `what`."""
    rows = []
    for number, codec, tensor in jobs:
        job = Job(codec, tensor, "fast", checksum=True)
        rows.append({what: number} | measure(job, repeat))
        speeds = "encode {encode_gbps:6.0f}, decode {decode_gbps:6.0f} GB/s".format(**rows[-1])
        print(f"{number:3} {what}: {speeds}", flush=True)
    return rows


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--parts", default=",".join(PARTS), help="which tables, by commas")
    parser.add_argument("--dietgpu", type=Path, help="DietGPU's library, see codec_gpu_peers.py")
    parser.add_argument("--splitzip", type=Path, help="the path of SplitZip's codec_gpu.py")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    return options


def main() -> None:
    options = arguments()
    backend = backends()["cuda"]
    if not backend.available:
        sys.exit(f"the codec has no GPU to run on here: {backend.detail}")
    nbytes = options.mib * MIB
    measures = {
        "table": lambda: table(nbytes, options.repeat),
        "sizes": lambda: by_size(options.repeat),
        "peers": lambda: peer_table(nbytes, options.repeat, options.dietgpu, options.splitzip),
        "blocks": lambda: by_blocks(nbytes, options.repeat),
    }
    found: dict[str, object] = {"mib": options.mib}
    for part in options.parts:
        found[part] = measures[part]()
        record(options.json, found, "cupy-cuda13x")  # after each: a later one may fail


if __name__ == "__main__":
    main()
