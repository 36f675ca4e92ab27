"""The benchmarks of `stormd bench`, and how their figures are shown.

A figure is reported with the machine, the versions, the date and the command that gave it. Figures
of the daemon are from a daemon and a client in separate processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from storm_bench.child_daemon import ChildDaemon, tail
from storm_bench.codec import measure_codec, print_captured, print_codec
from storm_bench.gemm import add_gemm_arguments, measure_gemm, print_gemm
from storm_bench.interrupts import noted_interrupts
from storm_bench.rows import run_child
from storm_bench.scan import add_scan_arguments, measure_scan, print_scan
from storm_bench.ternary import (
    add_ternary_arguments,
    measure_ternary,
    print_ternary,
)
from storm_bench.train.command import add_train_arguments, measure_train, print_train
from storm_bench.zoo.command import add_zoo_arguments, measure_zoo, print_zoo
from stormd.commands.arguments import positive_int
from stormd.errors import ChildFailed, ConfigError
from stormd.machine import describe
from stormd.output import EXIT_INTERRUPTED, EXIT_OK, write_json, write_line
from stormd.sizes import format_size, parse_size

__all__ = ["add_arguments", "run"]

_SECONDS: Final = 300.0

_MALLOC: Final = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296"
"""The client's process keeps freed memory, as in a training that runs for hours. So copying and
encoding are measured, not the kernel's first touch of new pages.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    text = "store and restore, codec raw, on the cpu lane, against two memcpys of the same bytes"
    link = benchmarks.add_parser("link", help=text, description=text)
    link.add_argument("--tensors", type=positive_int, default=16, help="tensors a round")
    link.add_argument("--tensor-bytes", default="16MiB", metavar="SIZE", help="size of each")
    link.add_argument(
        "--rounds",
        type=positive_int,
        default=20,
        help="rounds; of the large tensors the best counts, of the small ones the mean",
    )
    link.add_argument(
        "--operations", type=positive_int, default=300, help="small tensors, as in a large step"
    )
    text = "ratio and speed of the lossless codec, and what it makes of a training step's tensors"
    codec = benchmarks.add_parser("codec", help=text, description=text)
    codec.add_argument("--values", type=positive_int, default=1 << 24, help="values of a tensor")
    codec.add_argument("--rounds", type=positive_int, default=5, help="rounds; the best counts")
    codec.add_argument("--steps", type=positive_int, default=15, help="steps before capturing")
    text = "ternary products beside NumPy, torch and bitblas, and what a model takes in memory"
    ternary = benchmarks.add_parser("ternary", help=text, description=text)
    add_ternary_arguments(ternary)
    text = "a training step's time and peak memory without offload, with this one, and with others'"
    train = benchmarks.add_parser("train", help=text, description=text)
    add_train_arguments(train)
    text = "associative scans beside PyTorch's and others', and a copy of the same bytes"
    scan = benchmarks.add_parser("scan", help=text, description=text)
    add_scan_arguments(scan)
    text = "products that encode what they make, beside cuBLAS and encoding apart"
    gemm = benchmarks.add_parser("gemm", help=text, description=text)
    add_gemm_arguments(gemm)
    for benchmark in (link, codec, ternary, train, scan, gemm):
        benchmark.add_argument("--json", action="store_true", help="print the figures as JSON")
    text = "steps of models that people train, and nobody tuned for, by several methods"
    zoo = benchmarks.add_parser("zoo", help=text, description=text)
    add_zoo_arguments(zoo)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its figures. SIGTERM also ends the processes it has started."""
    measure, show = _BENCHMARKS[args.benchmark]
    with noted_interrupts():
        figures = measure(args)
    if args.json:
        write_json({"benchmark": args.benchmark, "machine": describe(), "figures": figures})
    else:
        show(figures)
    return EXIT_INTERRUPTED if figures.get("interrupted") else EXIT_OK


def _measure_link(args: argparse.Namespace) -> dict[str, Any]:
    nbytes = parse_size(args.tensor_bytes)
    if not nbytes:
        raise ConfigError("--tensor-bytes is 0: write the size of a tensor, as 16MiB")
    pool = 2 * args.tensors * nbytes + (256 << 20)
    flags = [f"--pool-bytes={pool}", "--cache-bytes=0", "--device=cpu"]
    with ChildDaemon(flags=flags) as daemon:
        numbers = {
            "address": daemon.address,
            "daemon-pid": daemon.pid,
            "tensors": args.tensors,
            "nbytes": nbytes,
            "rounds": args.rounds,
            "operations": args.operations,
        }
        return _run_client("link", [f"--{name}={value}" for name, value in numbers.items()])


def _measure_codec(args: argparse.Namespace) -> dict[str, Any]:
    captured = _run_client("activations", [f"--steps={args.steps}"])
    return {"kinds": measure_codec(args.values, args.rounds), "captured": captured["families"]}


def _print_codec(figures: dict[str, Any]) -> None:
    print_codec(figures["kinds"])
    write_line()
    print_captured(figures["captured"])


def _run_client(benchmark: str, arguments: list[str]) -> dict[str, Any]:
    environ = {**os.environ, "GLIBC_TUNABLES": _MALLOC}
    command = [sys.executable, "-m", f"storm_bench.{benchmark}", *arguments]
    ended = run_child(command, _SECONDS, environ)
    if ended.status is None:
        raise ChildFailed(f"the benchmark took longer than {_SECONDS:g} s")
    if ended.status != 0:
        raise ChildFailed(f"the benchmark ended with {ended.status}: {tail(ended.complaints)}")
    figures: dict[str, Any] = json.loads(ended.output)
    return figures


def _print_link(figures: dict[str, Any]) -> None:
    rows = [
        ("store and restore", f"{format_size(figures['link_bytes_per_second'])}/s"),
        ("two plain memcpys", f"{format_size(figures['memcpy_bytes_per_second'])}/s"),
        ("link, of the memcpys' speed", f"{figures['link_to_memcpy']:.0%}"),
        ("hook's own time, store", f"{figures['hook_store_seconds'] * 1e6:.1f} us a tensor"),
        ("hook's own time, restore", f"{figures['hook_restore_seconds'] * 1e6:.1f} us a tensor"),
        ("daemon", f"{figures['daemon_seconds_per_operation'] * 1e6:.1f} us an operation"),
    ]
    for name, value in rows:
        write_line(f"{name:30} {value}")


_BENCHMARKS: Final[dict[str, tuple[Callable[[argparse.Namespace], Any], Callable[[Any], None]]]] = {
    "link": (_measure_link, _print_link),
    "codec": (_measure_codec, _print_codec),
    "ternary": (measure_ternary, print_ternary),
    "train": (measure_train, print_train),
    "scan": (measure_scan, print_scan),
    "gemm": (measure_gemm, print_gemm),
    "zoo": (measure_zoo, print_zoo),
}
"""Each benchmark's measurement, and how its figures are shown to people."""
