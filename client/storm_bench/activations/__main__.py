"""Prints one JSON object; run as `python -m storm_bench.activations`."""

from __future__ import annotations

import argparse
import json
import sys

from storm_bench.activations.figures import measure


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--min-bytes", type=int, default=1 << 16)
    args = parser.parse_args()
    families = measure(args.steps, args.min_bytes)
    json.dump({"steps": args.steps, "families": families}, sys.stdout)


if __name__ == "__main__":
    main()
