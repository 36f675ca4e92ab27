r"""Prints the row of one model by one method; run as `python -m storm_bench.zoo`.

    stormd run --mps on --pool-bytes 64GiB -- python -m storm_bench.zoo llama storm
    stormd run --mps on --pool-bytes 64GiB -- torchrun --nproc-per-node 2 -m storm_bench.zoo \
        ranks storm --ranks fsdp
    stormd run -- python -m storm_bench.zoo llama storm --small       # on a CPU

With --plan, the plan's table and the step times of all compared plans are printed to standard
error. Each rank prints a line of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch

from storm_bench.zoo import METHODS, MODELS
from storm_bench.zoo.models import Size
from storm_bench.zoo.row import Trial, measure


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m storm_bench.zoo")
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--budget", help="of storm (default: the least)")
    parser.add_argument("--warm-ups", type=int, default=70, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=10, help="those behind them, which do")
    parser.add_argument("--ranks", choices=("ddp", "fsdp"), default="", help="under torchrun")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="of a rank's batch, of the model named ranks"
    )
    parser.add_argument("--plan", action="store_true", help="print the plan to standard error")
    parser.add_argument("--small", action="store_true", help="narrow and short, to try it")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.ranks:
        device = _join(device.type)
    trial = Trial(
        model=args.model,
        method=args.method,
        budget=args.budget,
        size=Size(device, args.small, args.tokens),
        warm_ups=args.warm_ups,
        steps=args.steps,
        ranks=args.ranks,
        shows_plan=args.plan,
    )
    sys.stdout.write(json.dumps(measure(trial)) + "\n")  # in one write: ranks share it
    sys.stdout.flush()
    if args.ranks:
        torch.distributed.destroy_process_group()


def _join(kind: str) -> torch.device:
    """Join the process group of torchrun's ranks, and return this rank's device."""
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


if __name__ == "__main__":
    main()
