"""How well offsets are chosen: on the cases of google/minimalloc.

    git clone https://github.com/google/minimalloc
    python tests/bench/layout.py minimalloc/benchmarks/challenging \\
        --json tests/bench/results/layout.json

Each file has buffers with the times from `lower` up to `upper` at which they are needed, and its
name has the capacity in which they fit. A row has what the greedy start needs, beside the capacity,
what a search made of it (--search: the client's own, in one thread, or CP-SAT with --workers
threads), and in how many seconds of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path

from storm_client.compile.layout import Block, Layout, bound, greedy, improved
from storm_client.compile.layout_search import packed

from stormd.machine import describe, package_versions


def read(path: Path) -> list[Block]:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return [Block(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in rows]


def searched(
    blocks: list[Block], start: Layout, capacity: int, arguments: argparse.Namespace
) -> Layout:
    if arguments.search == "cp-sat":
        return improved(
            blocks, start, arguments.seconds, capacity=capacity, workers=arguments.workers
        )
    offsets = packed(blocks, capacity, arguments.seconds, seed=arguments.seed)
    if offsets is None:
        return start
    tops = [offset + block.nbytes for offset, block in zip(offsets, blocks, strict=True)]
    return Layout(offsets, max(tops), start.bound)


def measure(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    blocks = read(path)
    capacity = int(path.stem.rsplit(".", 1)[-1])
    began, began_cpu = time.perf_counter(), time.process_time()
    start = greedy(blocks)
    found = searched(blocks, start, capacity, arguments)
    spent, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    found.assert_invariants(blocks)
    return {
        "case": path.stem,
        "buffers": len(blocks),
        "bound": bound(blocks),
        "capacity": capacity,
        "greedy": round(start.nbytes / capacity, 4),
        "found": round(found.nbytes / capacity, 4),
        "fits": found.nbytes <= capacity,
        "seconds": round(spent, 2),
        "cpu_seconds": round(cpu, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--search", choices=["own", "cp-sat"], default="own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for path in sorted(arguments.cases.glob("*.csv")):
        rows.append(measure(path, arguments))
        print(*rows[-1].values(), sep="\t", flush=True)
    print(f"{sum(bool(row['fits']) for row in rows)} of {len(rows)} fit")
    if arguments.json:
        about = {
            "machine": describe(),
            "versions": package_versions(("ortools",)),
            "seconds": arguments.seconds,
            "search": arguments.search,
            "seed": arguments.seed,
            "workers": arguments.workers if arguments.search == "cp-sat" else 1,
        }
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
