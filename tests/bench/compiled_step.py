"""How long so many steps of a small transformer take from nothing, compilation included.

    python tests/bench/compiled_step.py --json tests/bench/results/compiled_step.json

Each method runs in a process of its own with empty caches of compiled code: the forward pass by
torch.compile with an eager optimizer, as scripts have it; the step as it is; and the whole step by
`storm.compile_step`, with PyTorch's kernels and with Inductor's. Nothing is offloaded. A row has
the seconds of all steps, of the first two, and the last ones' median; losses are compared. What the
step's temporaries need packed, of one buffer a value, is said by `explain`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import storm_client as storm
import torch
from torch import Tensor, nn
from torch.nn import functional

from stormd.machine import describe, package_versions

METHODS = ("torch.compile", "compile_step eager", "compile_step inductor", "eager")
WORDS = 256
HUGE = 1 << 50
"""`min_bytes` with which nothing leaves."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, w // 64, 64).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def transformer(layers: int, width: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.Linear(width, WORDS)).to(device)


def prepared(method: str, net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    forward = torch.compile(net) if method == "torch.compile" else net

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.cross_entropy(forward(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if method.startswith("compile_step"):
        return storm.compile_step(step, codegen=method.split()[1], min_bytes=HUGE)
    return step


def measure(method: str, arguments: argparse.Namespace, layers: int) -> dict[str, Any]:
    """Make all steps in this process."""
    net = transformer(layers, arguments.width, arguments.device)
    shape = (arguments.rows, arguments.tokens)
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    began = time.perf_counter()
    step = prepared(method, net)
    for _ in range(arguments.steps):
        x, y = (
            torch.randint(WORDS, shape, generator=generator).to(arguments.device) for _ in range(2)
        )
        start = time.perf_counter()
        losses.append(float(step(x, y).detach()))
        seconds.append(time.perf_counter() - start)
    row = {
        "layers": layers,
        "method": method,
        "seconds": round(time.perf_counter() - began, 2),
        "first_two_seconds": round(sum(seconds[:2]), 2),
        "milliseconds": round(1e3 * statistics.median(seconds[len(seconds) // 2 :]), 3),
        "last_loss": losses[-1],
    }
    if hasattr(step, "explain"):
        explained = step.explain()
        row["packed_share"] = round(explained.share, 4)
        row["above_bound"] = round(explained.layout.nbytes / explained.layout.bound, 4)
    return row


def in_a_process_of_its_own(
    method: str, arguments: argparse.Namespace, layers: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, __file__, "--one", method, "--layers", str(layers)]
        for name in ("width", "rows", "tokens", "steps", "device"):
            command += [f"--{name}", str(getattr(arguments, name))]
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": empty}
        done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments, arguments.layers[0])))
        return
    rows = []
    for layers in arguments.layers:
        for method in arguments.methods:
            rows.append(in_a_process_of_its_own(method, arguments, layers))
            print(*rows[-1].values(), sep="\t", flush=True)
            if arguments.json:
                write(arguments, rows)


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    figures = {
        "machine": describe(),
        "packages": package_versions(),
        "load": os.getloadavg(),
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k not in ("json", "one")},
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
