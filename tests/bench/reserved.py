"""What PyTorch's allocator holds of a GPU beyond the peak of what is allocated, and where.

    stormd run --mps on --pool-bytes 64GiB -- python tests/bench/reserved.py llama
    stormd run -- python tests/bench/reserved.py gpt2 lora moe --show

Models are those of `stormd bench zoo`. Each is trained without offload and with it, in processes of
their own. Rows say what is reserved, what of that was never in use at the same time, and in which
streams' pools it lies. `--show` lists the largest free blocks with the lines of Python that made
them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import storm_client as storm
import torch
from storm_bench.zoo.models import WORKLOADS, Size

GIB = 1 << 30
MEASURED = 10
"""The steps at the end that count."""
GOAL_GIB = 0.3
"""What offload may reserve beyond its peak more than training without does."""

OWN = "storm_client"
LARGEST = 12
FRAMES = 6


def train(options: argparse.Namespace, model: str, method: str) -> dict[str, Any]:
    """Return what the allocator held of the last steps."""
    torch.manual_seed(0)
    workload = WORKLOADS[model](Size(torch.device("cuda"), options.small))
    net = workload.model.train()
    offload = storm.offload(net, budget=options.budget) if method == "storm" else None
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    if options.show:
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    for step in range(options.steps):
        if step == options.steps - MEASURED:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(step)
        cast = workload.autocast
        with offload or nullcontext(), torch.autocast("cuda", cast) if cast else nullcontext():
            loss = workload.loss(net)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    segments = torch.cuda.memory_snapshot()
    if options.show:
        for line in largest_free(segments):
            print(line, file=sys.stderr)
    return {
        "model": model,
        "method": method,
        "peak_gib": in_gib(torch.cuda.max_memory_allocated()),
        "reserved_gib": in_gib(torch.cuda.max_memory_reserved()),
        "beyond_gib": in_gib(torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "by_stream": by_stream(segments),
        "free_by_segment": free_by_segment(segments),
    }


def in_gib(nbytes: int) -> float:
    return round(nbytes / GIB, 2)


def by_stream(segments: list[dict[str, Any]]) -> dict[str, float]:
    """Return what is reserved for each stream: 0 is the default one."""
    found: Counter[str] = Counter()
    for segment in segments:
        found["default" if not segment["stream"] else f"{segment['stream']:#x}"] += segment[
            "total_size"
        ]
    return {name: in_gib(nbytes) for name, nbytes in found.most_common()}


def free_by_segment(segments: list[dict[str, Any]]) -> dict[str, float]:
    """Return what is free now, by how large the segments are in which it lies, in MiB."""
    found: Counter[str] = Counter()
    for segment in segments:
        size = 1 << (segment["total_size"] >> 20).bit_length()
        found[f"< {size} MiB"] += segment["total_size"] - segment["allocated_size"]
    return {name: in_gib(nbytes) for name, nbytes in found.most_common() if nbytes > GIB // 20}


def largest_free(segments: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the largest free blocks, and who allocated from there last."""
    blocks = [
        (block["size"], segment["stream"], block)
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    for size, stream, block in sorted(blocks, key=lambda one: -one[0])[:LARGEST]:
        frames = block.get("frames") or []
        places = [f"{one['filename'].rpartition('/')[2]}:{one['line']}" for one in frames[:FRAMES]]
        ours = " (stormd's)" if any(OWN in one["filename"] for one in frames) else ""
        yield f"{in_gib(size)} GiB free, stream {stream:#x}{ours}: {' < '.join(places)}"


def compare(options: argparse.Namespace, model: str) -> bool:
    """Print the rows of a model; tell whether offload stays within the goal."""
    rows = {}
    for method in ("none", "storm"):
        command = [sys.executable, __file__, model, "--method", method, *options.passed]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        sys.stderr.write(done.stderr)
        if done.returncode:
            print(f"{model} {method} failed")
            return False
        rows[method] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(rows[method]))
    more = rows["storm"]["beyond_gib"] - rows["none"]["beyond_gib"]
    is_met = more <= GOAL_GIB
    print(f"{model}: {more:+.2f} GiB beyond the peak than without; goal {GOAL_GIB}: {is_met}")
    return is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=WORKLOADS)
    parser.add_argument("--method", choices=["none", "storm"], help="in this process")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--budget", default=None)
    parser.add_argument("--show", action="store_true", help="list the largest free blocks")
    parser.add_argument("--small", action="store_true", help="narrow and short, to try it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("reserved.py looks at a GPU's memory, and there is none here")
    if options.method:
        print(json.dumps(train(options, options.models[0], options.method)))
        return 0
    given = sys.argv[1:]
    options.passed = [one for one in given if one not in options.models]
    missed = [model for model in options.models if not compare(options, model)]
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
