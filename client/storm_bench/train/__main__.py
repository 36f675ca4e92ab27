"""Measures one method on one workload; run as `python -m storm_bench.train`.

Prints one line of JSON, and then holds on to what the method uses until standard input ends, so
that whoever started it can look at the memory that a session takes on both sides.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from storm_bench.train.measure import Trial, measured
from storm_bench.train.workloads import WORKLOADS


def main() -> None:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m storm_bench.train")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--warm-ups", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    trial = Trial(
        workload=args.workload,
        method=args.method,
        device=torch.device(args.device),
        address=args.address,
        warm_ups=args.warm_ups,
        steps=args.steps,
    )
    with measured(trial) as figures:
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
