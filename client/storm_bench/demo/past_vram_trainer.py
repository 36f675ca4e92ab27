"""The training process of `stormd demo --past-vram`: a GPT on real text, within a memory limit.

Run as `python -m storm_bench.demo.past_vram_trainer`; prints one JSON object per line. With and
without `--address` the same model takes the same batches, under a limit that PyTorch itself
enforces. Running out of memory is reported as such, never retried in another way.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any

import storm_client as storm
import torch

from storm_bench.demo.text import VOCABULARY, Corpus, standard_library_text
from storm_bench.demo.trainer import report_line
from storm_bench.train.gpt import Gpt, Workload, attention
from storm_bench.train.workloads import plain_loss

__all__ = ["main"]

_SEED = 1234
_RATE = 0.02


def main(arguments: list[str] | None = None) -> None:
    """Train as the arguments say, or report that memory ran out."""
    args = _parser().parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit_bytes / total), device)
    try:
        _train(args, device)
    except torch.OutOfMemoryError as error:
        report_line(event="out_of_memory", error=str(error).partition("\n")[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m storm_bench.demo.past_vram_trainer")
    parser.add_argument("--address", help="daemon to offload to; without it nothing is offloaded")
    parser.add_argument("--limit-bytes", type=int, required=True)
    for name in ("steps", "layers", "width", "rows", "length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def _train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(_SEED)
    work = Workload(args.width, args.layers, args.rows, args.length, vocabulary=VOCABULARY)
    with device:
        model = Gpt(work).to(torch.bfloat16)
    report_line(event="model", parameters=sum(one.numel() for one in model.parameters()))
    with contextlib.ExitStack() as stack:
        offload = None
        if args.address:
            client = stack.enter_context(storm.connect(args.address, embedded="never"))
            offload = client.offload(model)
        stack.enter_context(attention(device))
        _take_steps(model, work, args.steps, offload)
        report_line(
            event="end",
            peak_bytes=torch.cuda.max_memory_reserved(device),
            offloaded_bytes=offload.stats().offloaded_bytes if offload else 0,
            ratio=offload.stats().ratio if offload else 0.0,
        )


def _take_steps(
    model: Gpt, work: Workload, steps: int, offload: AbstractContextManager[Any] | None
) -> None:
    device = next(model.parameters()).device
    corpus = Corpus(standard_library_text(), seed=_SEED, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, fused=True)
    for step in range(steps):
        inputs, targets = corpus.batch(work.batch, work.length)
        begin = time.perf_counter()
        with offload or contextlib.nullcontext():
            x = model.embed(inputs)
            for block in model.blocks:
                x = block(x)
            loss = plain_loss(model, x, targets)
        del x
        loss.backward()  # type: ignore[no-untyped-call]  # torch's gap
        optimizer.step()
        optimizer.zero_grad()
        report_line(event="step", step=step, loss=loss.item(), seconds=time.perf_counter() - begin)


if __name__ == "__main__":
    main()
