"""Ternary products on a GPU beside torch's bfloat16, from memory that no cache holds.

    PYTHONPATH=kernels:tests python tests/bench/ternary_gpu.py --json FILE
    PYTHONPATH=kernels:tests python tests/bench/ternary_gpu.py --hopper 45 --json FILE

The second compares the kernels for Hopper with the others, and with what is chosen, then ways to
cut a product, the likeliest first, until that many seconds have passed. Results are checked first.
Each figure is the median over replays of a CUDA graph that goes through as many copies of w as
exceed the second-level cache, so host time is not in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from recording import parser_of, record
from storm_kernels.ternary import TernaryTensor, cuda, hopper
from storm_kernels.ternary.hopper import Way
from storm_kernels.ternary.planes import Kind

SHAPES = [(2048, 2048), (8192, 8192), (13824, 2560), (16384, 16384)]
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
HOPPER_BATCHES = [1, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
SWEPT_BATCHES = [64, 16, 128, 32, 256]
KINDS = {"int8": Kind.INT8, "bfloat16": Kind.BFLOAT16}
COLD_BYTES = 192 << 20
REPLAYS = 15
NEVER, ALWAYS = range(1 << 30, 1 << 30), range(1, 1 << 30)


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
    """Return a figure for each batch: ours by kind of x, as chosen and with a dense product."""
    w, peer = planes(rows, columns), dense(rows, columns)
    found = []
    for batch in BATCHES:
        x = {kind: operand(batch, columns, kind) for kind in ("int8", "bfloat16", "float32")}
        row: dict[str, object] = {"rows": rows, "columns": columns, "batch": batch}
        row["torch_bfloat16"] = timed(lambda i, x=x: x["bfloat16"] @ peer[i].T, len(peer))
        for kind, limit in (("int8", NEVER.start), ("bfloat16", NEVER.start), ("float32", 64)):
            if batch <= limit:
                row[kind] = timed(lambda i, k=kind, x=x: w[i].matmul(x[k]), len(w))
            if batch > 16:
                with forced(NEVER, 2):
                    row[f"{kind}_dense"] = timed(lambda i, k=kind, x=x: w[i].matmul(x[k]), len(w))
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


@contextmanager
def forced(batches: range, dense_from: int, way: Way | None = None) -> Iterator[None]:
    """Have these numbers of x go to the kernels for Hopper, in that way if given.

    Of others those from `dense_from` on go to a dense product.
    """
    usual, usual_dense, chosen = dict(hopper.BATCHES), dict(cuda.DENSE_FROM), hopper.chosen
    hopper.BATCHES.update(dict.fromkeys(usual, (batches,)))
    cuda.DENSE_FROM.update(dict.fromkeys(usual_dense, dense_from))
    if way is not None:
        hopper.chosen = lambda *_: way
    try:
        yield
    finally:
        hopper.BATCHES.update(usual)
        cuda.DENSE_FROM.update(usual_dense)
        hopper.chosen = chosen


class Shape:
    """Copies of w, and of a bfloat16 matrix of its size, in more memory than the caches have."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.w, self.peer = planes(rows, columns), dense(rows, columns)
        self._values = cuda.decode(*self.w[0].planes, columns, Kind.INT8).float()

    def torch(self, batch: int) -> float:
        x = operand(batch, self.columns, "bfloat16")
        return timed(lambda i: x @ self.peer[i].T, len(self.peer))

    def ours(self, kind: str, batch: int) -> float:
        x = operand(batch, self.columns, kind)
        return timed(lambda i: self.w[i].matmul(x), len(self.w))

    def wrong(self, kind: str, batch: int) -> int:
        """Return how many results of whole numbers, whose sums float32 has, are wrong."""
        x = torch.randint(-128, 128, (batch, self.columns), dtype=torch.int8).cuda()
        expected = x.float() @ self._values.T
        found = self.w[0].matmul(x if kind == "int8" else x.bfloat16())
        return int((found.float() != expected).sum())


def likely(kind: Kind, rows: int, columns: int, batch: int) -> list[Way]:
    """Return the ways of least cost, and the first with less and more in flight."""
    found = [way for _, way in sorted(hopper.ways(kind, rows, columns, batch))]
    first = found[0]
    others = [replace(first, alone=not first.alone)]
    if first.stages > 4:
        others.append(replace(first, stages=4))
    if first.depth > 2:
        others.append(replace(first, depth=2))
    return found[:3] + others


def compared(shape: Shape, batch: int) -> dict[str, object]:
    """Return a figure for each way that a product can go."""
    row: dict[str, object] = {"rows": shape.rows, "columns": shape.columns, "batch": batch}
    row["torch_bfloat16"] = shape.torch(batch)
    for name, kind in KINDS.items():
        row[name] = shape.ours(name, batch)
        if batch <= 128:
            with forced(NEVER, NEVER.start):
                row[f"{name}_few"] = shape.ours(name, batch)
        if batch > 64:
            with forced(NEVER, 2):
                row[f"{name}_dense"] = shape.ours(name, batch)
        if batch > 1:
            with forced(ALWAYS, NEVER.start):
                row[f"{name}_wrong"] = shape.wrong(name, batch)
                row[f"{name}_hopper"] = shape.ours(name, batch)
            row[f"{name}_way"] = str(hopper.chosen(kind, shape.rows, shape.columns, batch))
    return row


def hopper_figures(seconds: float) -> dict[str, object]:
    began = time.monotonic()
    if not cuda.has_hopper(0):
        raise SystemExit("the kernels for Hopper do not run here")
    print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)
    shapes = [Shape(*shape) for shape in SHAPES]
    print(f"made operands by {time.monotonic() - began:.1f} s", flush=True)
    found: list[dict[str, object]] = []
    for shape in shapes:
        for batch in HOPPER_BATCHES:
            found.append(compared(shape, batch))
            told = {k: v for k, v in found[-1].items() if not k.endswith("_way")}
            print(*(f"{k} {v}" for k, v in told.items()), sep=", ", flush=True)
    print(f"swept from {time.monotonic() - began:.1f} s", flush=True)
    swept: list[dict[str, object]] = []
    todo = [(b, s, name) for b in SWEPT_BATCHES for s in shapes for name in KINDS]
    for batch, shape, name in todo:
        for way in likely(KINDS[name], shape.rows, shape.columns, batch):
            if time.monotonic() - began > seconds:
                print("no time for more ways")
                return {"compared_us": found, "swept": swept}
            with forced(ALWAYS, NEVER.start, way):
                row = {
                    "rows": shape.rows, "columns": shape.columns, "batch": batch, "x": name,
                    "way": str(way), "wrong": shape.wrong(name, batch),
                    "microseconds": shape.ours(name, batch),
                }  # fmt: skip
            swept.append(row)
            print(
                f"{shape.rows:5} x {shape.columns:5}, {batch:3} {name:8} groups {way.groups} "
                f"splits {way.splits} stages {way.stages} depth {way.depth} alone {way.alone}: "
                f"{row['microseconds']} us, {row['wrong']} wrong", flush=True,
            )  # fmt: skip
    return {"compared_us": found, "swept": swept}


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
    parser = parser_of(__doc__)
    parser.add_argument("--hopper", type=float, metavar="SECONDS")
    args = parser.parse_args()
    figures: dict[str, object]
    if args.hopper:
        figures = hopper_figures(args.hopper)
    else:
        figures = {"others_us": others(), "microseconds": [r for s in SHAPES for r in rows_of(*s)]}
    record(args.json, {"figures": figures})


if __name__ == "__main__":
    main()
