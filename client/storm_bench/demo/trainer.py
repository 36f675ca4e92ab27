"""Trains the demo's GPT and reports every step as one JSON line on standard output.

Run as `python -m storm_bench.demo.trainer`. With and without `--address` the same operations run on
the same data. The digest of a step covers the bytes of every gradient.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from contextlib import AbstractContextManager
from typing import Any

import storm_client as storm
import torch
from torch import Tensor

from storm_bench.demo.model import GPT, Shape
from storm_bench.demo.text import Corpus, standard_library_text
from storm_bench.devices import peak_bytes

__all__ = ["main", "report_line"]


def main(arguments: list[str] | None = None) -> None:
    """Train as the arguments say."""
    args = _parser().parse_args(arguments)
    _make_deterministic(args.seed, args.threads)
    device = torch.device(args.device)
    shape = Shape(args.layers, args.width, args.heads, args.rows, args.length)
    model = GPT(shape).to(device)
    with contextlib.ExitStack() as stack:
        offload = None
        if args.address:
            client = stack.enter_context(storm.connect(args.address, embedded="never"))
            offload = client.offload(model)
        _train(model, shape, args, offload)
        _report_end(device, offload)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m storm_bench.demo.trainer")
    parser.add_argument("--address", help="daemon to offload to; without it nothing is offloaded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    for name in ("seed", "steps", "threads", "layers", "width", "heads", "rows", "length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def _make_deterministic(seed: int, threads: int) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)


def _train(
    model: GPT,
    shape: Shape,
    args: argparse.Namespace,
    offload: AbstractContextManager[Any] | None,
) -> None:
    device = torch.device(args.device)
    corpus = Corpus(standard_library_text(), seed=args.seed, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    for step in range(args.steps):
        inputs, targets = corpus.batch(shape.rows, shape.length)
        started = _now(device)
        with offload or contextlib.nullcontext(), precision:
            loss = model(inputs, targets)
        loss.backward()
        seconds = _now(device) - started
        gradients = _digest(model)
        optimizer.step()
        optimizer.zero_grad()
        report_line(event="step", step=step, loss=loss.item(), gradients=gradients, seconds=seconds)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _digest(model: GPT) -> str:
    """Return a digest of the bytes of all gradients in the order of the parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None  # every parameter takes part in the loss
        digest.update(_bytes(gradient))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _report_end(device: torch.device, offload: Any) -> None:
    report_line(
        event="end",
        peak_bytes=peak_bytes(torch.device("cpu")),  # resident: own and touched shared memory
        device_peak_bytes=peak_bytes(device) if device.type == "cuda" else 0,
        stats=_figures(offload.stats()) if offload is not None else None,
    )


def _figures(stats: storm.OffloadStats) -> dict[str, float]:
    names = ("saved", "deduplicated", "offloaded", "replayed", "skipped", "stored", "kept")
    return {"ratio": stats.ratio, **{f"{n}_bytes": getattr(stats, f"{n}_bytes") for n in names}}


def report_line(**fields: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
