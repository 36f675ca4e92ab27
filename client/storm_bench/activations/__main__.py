"""Prints one JSON object; run as `python -m storm_bench.activations`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from storm_bench.activations.figures import measure
from storm_bench.pictures import draw_captured


def main() -> None:
    """Measure, draw if requested, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--min-bytes", type=int, default=1 << 16)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--analyze", action="store_true", help="each tensor in every mode")
    args = parser.parse_args()
    families = measure(args.steps, args.min_bytes, analyze=args.analyze)
    if args.image is not None:
        draw_captured(families, args.image)
    json.dump({"steps": args.steps, "families": families}, sys.stdout)


if __name__ == "__main__":
    main()
