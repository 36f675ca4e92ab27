"""Ternary products on a GPU beside torch's bfloat16, from memory that no cache holds.

    PYTHONPATH=kernels:tests python tests/bench/ternary_gpu.py --json FILE

Each figure is the median over replays of a CUDA graph that goes through as many copies of w as
exceed the second-level cache, so host time is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from storm_kernels.ternary import TernaryTensor, cuda
from storm_kernels.ternary.planes import Kind

SHAPES = [(2048, 2048), (8192, 8192), (13824, 2560), (16384, 16384)]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
COLD_BYTES = 192 << 20
REPLAYS = 15
NEVER = 1 << 30


def timed(call: Callable[[int], object], copies: int) -> float:
    """Return microseconds a call, which is told which copy of w to use."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    count = max(copies, 4)
    with torch.cuda.graph(graph):
        for number in range(count):
            call(number % copies)
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / count)
    return round(statistics.median(found), 2)


def planes(rows: int, columns: int) -> list[TernaryTensor]:
    one = TernaryTensor.encode(torch.randint(-1, 2, (rows, columns), dtype=torch.int8).cuda())
    copies = max(2, -(-COLD_BYTES // one.nbytes))
    return [TernaryTensor(one.bit0.clone(), one.bit1.clone(), one.shape) for _ in range(copies)]


def dense(rows: int, columns: int) -> list[torch.Tensor]:
    copies = max(2, -(-COLD_BYTES // (2 * rows * columns)))
    return [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(copies)]


def operand(batch: int, columns: int, kind: str) -> torch.Tensor:
    if kind == "int8":
        return torch.randint(-128, 128, (batch, columns), dtype=torch.int8).cuda()
    return torch.randn(batch, columns, device="cuda").to(getattr(torch, kind))


def rows_of(rows: int, columns: int) -> list[dict[str, object]]:
    """Return a figure for each batch: ours by kind of x, without and with a dense product."""
    w, peer = planes(rows, columns), dense(rows, columns)
    found = []
    for batch in BATCHES:
        x = {kind: operand(batch, columns, kind) for kind in ("int8", "bfloat16", "float32")}
        row: dict[str, object] = {"rows": rows, "columns": columns, "batch": batch}
        row["torch_bfloat16"] = timed(lambda i, x=x: x["bfloat16"] @ peer[i].T, len(peer))
        for kind, limit in (("int8", NEVER), ("bfloat16", NEVER), ("float32", 64)):
            usual = dict(cuda.DENSE_FROM)
            try:
                cuda.DENSE_FROM.update(dict.fromkeys(usual, NEVER))
                if batch <= limit:
                    row[kind] = timed(lambda i, k=kind, x=x: w[i].matmul(x[k]), len(w))
                if batch > 16:
                    cuda.DENSE_FROM.update(dict.fromkeys(usual, 2))
                    row[f"{kind}_dense"] = timed(lambda i, k=kind, x=x: w[i].matmul(x[k]), len(w))
            finally:
                cuda.DENSE_FROM.update(usual)
        found.append(row)
        print(row, flush=True)
    signs = TernaryTensor.encode(torch.randint(-1, 2, (1, columns), dtype=torch.int8).cuda())
    found.append(
        {
            "rows": rows,
            "columns": columns,
            "batch": 1,
            "ternary": timed(lambda i: w[i].matmul(signs), len(w)),
        }
    )
    print(found[-1], flush=True)
    return found


def others() -> dict[str, float]:
    """Return encode, decode and dot of 2^26 values, in microseconds."""
    values = torch.randint(-1, 2, (1, 1 << 26), dtype=torch.int8).cuda()
    tensor = TernaryTensor.encode(values)
    from storm_kernels.ternary import dot

    return {
        "decode_64Mi_int8": timed(lambda _: cuda._decoded(*tensor.planes, 1 << 26, Kind.INT8), 1),
        "dot_64Mi": timed(lambda _: dot(*tensor.planes, *tensor.planes), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = {"others_us": others(), "microseconds": [r for s in SHAPES for r in rows_of(*s)]}
    if args.json:
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "date": time.strftime("%Y-%m-%d"),
            "command": "tests/bench/ternary_gpu.py " + " ".join(sys.argv[1:]),
        }
        args.json.write_text(json.dumps({"machine": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
