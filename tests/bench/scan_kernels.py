"""Every tile worth a try of the scans' kernels on a GPU, beside a copy that moves as many bytes.

    PYTHONPATH=kernels:tests python tests/bench/scan_kernels.py \
        --json tests/bench/results/scan_kernels_h200.json

float32, dimension 1, the kernels called as launches.py's choice is (row "chosen") or with the tile
given. A result counts if it is right and comes out the same, bit for bit, three times. Times are
medians of a call between two events, each behind a write of 1 GiB that empties the caches and
outlasts the call's host time. Processes of their own compile all tiles first, several at a time.
After --seconds no further tile is begun.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from recording import parser_of, record
from storm_kernels import scan
from storm_kernels.scan import cuda
from storm_kernels.scan.launches import Columns, Rows

Tile: TypeAlias = Columns | Rows
Run: TypeAlias = Callable[[], tuple[torch.Tensor, ...]]

FLUSHED_BYTES = 1 << 30
ROUNDS = 30
STREAMS = {"fold": 2, "linear": 3, "gradient": 5}
"""Tensors that a scan reads or writes."""
MAX_COMPILERS = 14
HOST_CALLS = 300


def walk(rows: int, stretches: int, channels: int, warps: int) -> Columns:
    return Columns(rows, stretches, channels, warps, look_back=False)


def back(rows: int, stretches: int, channels: int, warps: int, fan: int) -> Columns:
    return Columns(rows, stretches, channels, warps, look_back=True, fan=fan)


def row(elements: int, warps: int, fan: int = 0) -> Rows:
    return Rows(elements, warps, look_back=fan > 0, fan=fan or 32 * warps)


@dataclass(frozen=True)
class Case:
    """A scan ("fold" sums), its shape, and the tiles to try beside the chosen one."""

    scan: str
    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]


SHORT = (
    back(16, 16, 32, 4, 8),
    back(8, 16, 32, 4, 8),
    back(16, 8, 32, 2, 4),
    back(8, 32, 16, 4, 16),
    back(16, 16, 16, 2, 16),
)
LONG = (
    back(16, 16, 32, 4, 4),
    back(32, 16, 32, 4, 8),
    back(32, 16, 32, 4, 16),
    back(16, 8, 64, 4, 8),
    back(16, 16, 64, 8, 8),
)
LINEAR = (
    walk(8, 32, 16, 4),
    back(8, 16, 32, 4, 4),
    back(8, 16, 32, 4, 8),
    back(8, 32, 16, 4, 8),
    back(16, 16, 32, 4, 4),
    back(16, 32, 16, 4, 8),
    back(8, 8, 64, 4, 4),
)
GRADIENT = (*LINEAR, back(16, 16, 32, 4, 8))
ONE_ROW = (row(2048, 1, 32), row(4096, 1, 64), row(4096, 2, 128), row(8192, 2, 64))
ROWS = (
    row(128, 1),
    row(256, 2),
    row(512, 1),
    row(1024, 1),
    row(1024, 2),
    row(2048, 2),
    row(2048, 4),
    row(4096, 8),
)
CASES = (
    Case("gradient", (8 * 1536, 65536), ROWS),
    Case("linear", (8 * 1536, 65536), (row(1024, 4),)),
    Case("fold", (1, 65536, 512), LONG),
    Case("fold", (1, 1 << 24), ONE_ROW),
    Case("fold", (4, 8192, 512), LONG[:3]),
    Case("linear", (4, 8192, 512), LINEAR),
    Case("linear", (1, 65536, 512), LINEAR),
    Case("gradient", (4, 8192, 512), GRADIENT),
    Case("gradient", (1, 65536, 512), GRADIENT),
    Case("linear", (8, 4096, 2048), (back(16, 16, 32, 4, 4),)),
    Case("gradient", (8, 4096, 2048), (walk(8, 16, 32, 4), walk(8, 8, 64, 4))),
    Case("gradient", (1, 1 << 24), (row(512, 1, 32), row(2048, 1, 32), row(2048, 2, 64))),
    Case("fold", (4, 2048, 512), SHORT[:3]),
    Case("fold", (4, 512, 512), SHORT[:3]),
    Case("fold", (64, 8192), (row(2048, 1, 32),)),
    Case("fold", (4096, 4096), ()),
    Case("fold", (8, 4096, 2048), ()),
)


def prepared(case: Case, tile: Tile | None, tensors: tuple[torch.Tensor, ...]) -> Run:
    """Return what launches a case's kernel; `tensors` are those of `operands`."""
    x, a, *results = tensors
    if case.scan == "fold":
        options = {"op": "add", "reverse": False, "exclusive": False, "compensated": False}

        def run() -> tuple[torch.Tensor, ...]:
            cuda.fold(x, results[0], 1, tile=tile, **options)
            return (results[0],)

    elif case.scan == "linear":

        def run() -> tuple[torch.Tensor, ...]:
            cuda.linear(a, x, None, results[0], 1, reverse=False, tile=tile)
            return (results[0],)

    else:

        def run() -> tuple[torch.Tensor, ...]:
            cuda.linear_gradient(x, a, results[0], None, *results[1:], 1, reverse=False, tile=tile)
            return tuple(results[1:])

    return run


def called(case: Case, tensors: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], object]]:
    """Return public calls of a case, whose results are new memory, and another package's."""
    x, a, *results = tensors
    if case.scan == "fold":
        return {"public": lambda: scan.cumsum(x, 1)}
    ways = {"public": lambda a, x: scan.linear_scan(a, x)[0]}
    if len(case.shape) == 2:
        with suppress(ImportError):
            from accelerated_scan.scalar import scan as other

            ways["accelerated-scan"] = lambda a, x: other(a[None], x[None])
    if case.scan == "linear":
        return {name: partial(way, a, x) for name, way in ways.items()}
    sources = [one.clone().requires_grad_() for one in (a, x)]
    made = {name: way(*sources) for name, way in ways.items()}
    grad = results[0]
    return {
        name: partial(torch.autograd.grad, one, sources, grad.view_as(one), retain_graph=True)
        for name, one in made.items()
    }


def operands(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """Return b or the like, the factors, and what results are written to."""
    generator = torch.Generator(device).manual_seed(20) if device != "meta" else None
    x = torch.randn(case.shape, device=device, generator=generator)
    if case.scan == "fold":
        return x, x, torch.empty_like(x)
    a = torch.rand(case.shape, device=device, generator=generator)
    if case.scan == "linear":
        return x, a, torch.empty_like(x)
    h = torch.randn(case.shape, device=device, generator=generator)
    return x, a, h, torch.empty_like(x), torch.empty_like(x)


# --- compiling ------------------------------------------------------------------------------


class _Compiling:
    """Stands for a kernel whose launches are compiled and not made."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self._kernel.warmup, grid=grid)


def compile_tile(job: tuple[Case, Tile | None]) -> str:
    """Compile a tile into Triton's cache; return what kept it from being, if anything did."""
    case, tile = job
    found = cuda.load_kernels()
    stand_in: Any = type("Kernels", (), {})()
    for name in found.__all__:
        setattr(stand_in, name, _Compiling(getattr(found, name)))
    usual, cuda.load_kernels = cuda.load_kernels, lambda: stand_in
    try:
        prepared(case, tile, operands(case, "meta"))()
    except Exception as error:  # noqa: BLE001 (the launch itself will say it again)
        return f"{type(error).__name__}: {error}"
    finally:
        cuda.load_kernels = usual
    return ""


def compile_all(cases: list[Case]) -> None:
    jobs = [(case, tile) for case in cases for tile in (None, *case.tiles)]
    workers = max(1, min(MAX_COMPILERS, (os.cpu_count() or 1) - 1))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        reasons = [reason for reason in pool.map(compile_tile, jobs) if reason]
    if reasons:
        print(f"{len(reasons)} of {len(jobs)} not compiled ahead, first: {reasons[0][:300]}")


# --- measuring ------------------------------------------------------------------------------


def microseconds(work: Callable[[], object], flushed: torch.Tensor) -> float:
    """Return the median time of `work`, called with cold caches."""
    work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for begin, end in events:
        flushed.zero_()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)


def copy_microseconds(case: Case, flushed: torch.Tensor) -> float:
    """Return the time of a copy of as many bytes as the scan reads and writes."""
    count = torch.Size(case.shape).numel() * STREAMS[case.scan] // 2
    source = torch.zeros(count, device="cuda")
    target = torch.empty_like(source)
    return microseconds(lambda: target.copy_(source), flushed)


def expected(case: Case, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return a fold's results in double precision, a recurrence's by tiles in turn."""
    if case.scan == "fold" and tensors[0].numel() < 1 << 28:
        return (tensors[0].double().cumsum(1),)
    tile = row(256, 1) if len(case.shape) == 2 else walk(8, 16, 32, 4)
    return tuple(one.clone() for one in prepared(case, tile, tensors)())


def fault(run: Run, tensors: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> str:
    """Return what is wrong with the results of `run`, nothing if they are right."""
    written = tensors[-len(wanted) :]
    kept: list[torch.Tensor] = []
    for _ in range(3):
        for one in written:
            one.fill_(float("nan"))
        found = run()
        if kept and not all(map(torch.equal, found, kept)):
            return "not the same bits twice"
        kept = [one.clone() for one in found]
    for one, other in zip(kept, wanted, strict=True):
        error = sum(
            float((mine.double() - theirs.double()).square().sum())
            for mine, theirs in zip(one.split(1024), other.split(1024), strict=True)
        )
        size = sum(float(part.double().square().sum()) for part in other.split(1024))
        if not error <= 1e-10 * size:
            return f"wrong by {(error / size) ** 0.5:.1e} of its norm"
    return ""


def measured(case: Case, flushed: torch.Tensor, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each tile of a case."""
    tensors = operands(case, "cuda")
    copy = copy_microseconds(case, flushed)
    wanted = expected(case, tensors)
    for tile in (None, *case.tiles):
        if time.monotonic() > deadline:
            yield {"scan": case.scan, "shape": case.shape, "left_out": str(tile)}
            continue
        run = prepared(case, tile, tensors)
        found: dict[str, Any] = {"scan": case.scan, "shape": list(case.shape)}
        try:
            wrong = fault(run, tensors, wanted)
            taken = microseconds(run, flushed)
        except Exception as error:  # noqa: BLE001 (a tile may need more than a processor has)
            yield found | {"tile": str(tile), "failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        found |= {"copy_microseconds": round(copy, 1), "microseconds": round(taken, 1)}
        found |= {"of_copy": round(taken / copy, 3), "tile": str(tile or "chosen")}
        yield found | ({"wrong": wrong} if wrong else {})
    for name, call in called(case, tensors).items():
        taken = microseconds(call, flushed)
        found = {"scan": case.scan, "shape": list(case.shape), "copy_microseconds": round(copy, 1)}
        found |= {"microseconds": round(taken, 1), "of_copy": round(taken / copy, 3)}
        yield found | {"tile": name}


def host_microseconds() -> dict[str, float]:
    """Return what this process needs for a call on (4, 64, 64), while the GPU lags behind."""
    x = torch.randn(4, 64, 64, device="cuda")
    a, y = torch.rand_like(x), torch.empty_like(x)
    wanted = x.clone().requires_grad_()
    options = {"op": "add", "reverse": False, "exclusive": False, "compensated": False}
    calls: dict[str, Callable[[], object]] = {
        "torch.cumsum": lambda: torch.cumsum(x, 1),
        "torch.empty_like": lambda: torch.empty_like(x),
        "cuda.fold": lambda: cuda.fold(x, y, 1, **options),
        "cumsum": lambda: scan.cumsum(x, 1),
        "cumsum, gradient wanted": lambda: scan.cumsum(wanted, 1),
        "linear_scan": lambda: scan.linear_scan(a, x),
        "linear_scan's gradient": partial(
            torch.autograd.grad,
            scan.linear_scan(a, wanted)[0], wanted, torch.ones_like(x), retain_graph=True,
        ),
        "torch.cumsum's gradient": partial(
            torch.autograd.grad,
            torch.cumsum(wanted, 1), wanted, torch.ones_like(x), retain_graph=True,
        ),
    }  # fmt: skip
    found = {}
    for name, call in calls.items():
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        found[name] = round((time.perf_counter() - begun) / HOST_CALLS * 1e6, 1)
        torch.cuda.synchronize()
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", nargs="+", choices=sorted(STREAMS), default=sorted(STREAMS))
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    cases = [case for case in CASES if case.scan in args.only]
    compile_all(cases)
    print(f"compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Any]] = []
    figures = {"host_microseconds": host_microseconds(), "rows": rows}
    print(figures["host_microseconds"], flush=True)
    for case in cases:
        for found in measured(case, flushed, deadline):
            rows.append(found)
            print(*found.values(), flush=True)
            record(args.json, figures, "triton")


if __name__ == "__main__":
    main()
