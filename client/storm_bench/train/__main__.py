"""Measures methods on one workload, one after another; run as `python -m storm_bench.train`.

Prints a line of JSON for each method, and keeps the method's memory until it reads a line from
standard input. So the parent process can look at the memory that a session takes on both sides.
Ends when standard input ends.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from storm_bench.train.measure import Model, Trial, measured
from storm_bench.train.workloads import WORKLOADS


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m storm_bench.train")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--warm-ups", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    model = Model(args.workload, torch.device(args.device))
    for method in args.methods:
        trial = Trial(
            workload=args.workload,
            method=method,
            device=torch.device(args.device),
            address=args.address,
            warm_ups=args.warm_ups,
            steps=args.steps,
        )
        with measured(trial, model) as figures:
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()
            if not sys.stdin.readline():
                return
        model.free_memory()


if __name__ == "__main__":
    main()
