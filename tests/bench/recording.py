"""What benchmarks share: their arguments, how figures are recorded, how times are summed up."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stormd.machine import describe, package_versions


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows --json; `text` is the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser


def machine(*packages: str) -> dict[str, Any]:
    """Return what figures depend on: the machine, the date, the command and the versions."""
    import torch  # not in the processes that a benchmark starts, some of which need none

    found = describe()
    is_gpu = torch.cuda.is_available()
    main = sys.modules["__main__"].__spec__
    how = f"-m {main.name}" if main else sys.argv[0]
    return found | {
        "command": " ".join(["python", how, *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "versions": found["versions"] | package_versions(packages),
    }


def record(path: Path | None, figures: Mapping[str, Any], *packages: str) -> None:
    """Write figures and the machine to a file, if one is named."""
    if path is not None:
        result = {"machine": machine(*packages), **figures}
        path.write_text(json.dumps(result, indent=1) + "\n")


def show(path: Path | None, figures: Mapping[str, Any], *packages: str) -> None:
    """Print figures, and record them."""
    print(json.dumps(figures, indent=1))
    record(path, figures, *packages)


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the worst."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "worst": ordered[-1],
    }
