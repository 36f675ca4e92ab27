"""`stormd bench zoo`: step time and memory of models that nobody tuned for, by method.

The rows run one after another, each in a process of its own. One daemon serves all of them: that of
`stormd run` if there is one. A row that cannot run here contains the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from storm_bench.child_daemon import ChildDaemon, tail
from storm_bench.devices import MPS, compile_codec, device_here, mps_is_on
from storm_bench.interrupts import noted_interrupts
from storm_bench.pictures import draw_zoo
from storm_bench.rows import Column, in_short, print_table, ratio_to, run_child
from storm_bench.zoo import METHODS, MODELS, OFFLOADS, name_of
from stormd.commands.arguments import check_picture, positive_int, valid_budget
from stormd.errors import ConfigError
from stormd.machine import describe, memory_limit, package_versions
from stormd.output import write_line
from stormd.query import ADDRESS_VARIABLE, StatusQuery

__all__ = ["add_zoo_arguments", "measure_zoo", "print_zoo"]

_ALL: Final = "all"
_BUDGETS: Final = ("least", "0.25", "0.5", "0.75")
_PACKAGES: Final = ("transformers", "peft", "timm", "trl", "torchao", "liger-kernel")

_CHILD_SECONDS: Final = 900.0
_START_SECONDS: Final = 120.0
_GIB: Final = 1 << 30

_PLAIN_WARM_UPS: Final = 10
"""The most warm-up steps of methods that have no plan to find."""


def add_zoo_arguments(zoo: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is to be measured, and how."""
    zoo.add_argument(
        "--models",
        nargs="+",
        choices=(*MODELS, _ALL),
        default=[_ALL],
        metavar="MODEL",
        help="; ".join(f"{name}: {text}" for name, text in MODELS.items())
        + f"; {_ALL} (default: {_ALL})",
    )
    zoo.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        help="ways to train (default: all)",
    )
    zoo.add_argument(
        "--budgets",
        nargs="+",
        type=valid_budget,
        default=list(_BUDGETS),
        metavar="BUDGET",
        help="storm has a row with each of these: least, 0.5, 4GiB, fit (default: "
        f"{' '.join(_BUDGETS)})",
    )
    zoo.add_argument("--steps", type=positive_int, default=10, help="the median of these counts")
    zoo.add_argument(
        "--warm-ups",
        type=positive_int,
        default=70,
        help=f"steps before them with storm; at most {_PLAIN_WARM_UPS} with others (default: 70)",
    )
    zoo.add_argument(
        "--small", action="store_true", help="narrow, short models, which a CPU trains in seconds"
    )
    zoo.add_argument(
        "--json",
        dest="results",
        metavar="FILE",
        help="write the rows there, each as soon as it is measured (default: no)",
    )
    zoo.add_argument(
        "--picture", metavar="FILE", help="draw step time against peak memory (default: no)"
    )
    zoo.set_defaults(json=False)


def measure_zoo(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every row and return all; draw and write them if requested.

    Each row is reported on standard error once it is measured. SIGINT or SIGTERM ends the present
    row and leaves out the rest: the figures then say "interrupted".

    Raises:
        ConfigError: the requested picture or file could not be written.
        NoDaemon: the daemon that STORMD_ADDRESS names does not answer.
        ChildFailed: the daemon or the compiler could not do its work.
    """
    check_picture(args.picture, "--picture")
    device = device_here()
    figures: dict[str, Any] = {"machine": _machine(device), "interrupted": False, "rows": []}
    _write(figures, args.results)
    try:
        with noted_interrupts() as interrupts, _daemon(device, args.methods) as address:
            for wanted in _wanted(args):
                row = _measured(wanted, args, address)
                figures["machine"]["device"] = row.pop("device", figures["machine"]["device"])
                figures["rows"].append(row)
                _write(figures, args.results)
                sys.stderr.write(f"{row['model']} {name_of(row)}: {_short(row)}\n")
                interrupts.check()
    except KeyboardInterrupt:
        figures["interrupted"] = True
        _write(figures, args.results)
    if args.picture:
        draw_zoo(figures["rows"], Path(args.picture))
    return figures


def _machine(device: str) -> dict[str, Any]:
    machine = describe()
    machine["versions"] |= package_versions(_PACKAGES)
    return machine | {"device": device, "mps": mps_is_on(device)}


def _write(figures: dict[str, Any], file: str | None) -> None:
    """Write the figures to `file`; first called before measuring, to detect a bad name at once."""
    if file is None:
        return
    try:
        Path(file).write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {file!r} cannot be written: {error.strerror}") from error


def _wanted(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows' names: model, method and budget."""
    models = MODELS if _ALL in args.models else args.models
    for model in models:
        for method in args.methods:
            row = {"model": model, "method": method}
            if method == OFFLOADS:
                yield from (row | {"budget": budget} for budget in args.budgets)
            else:
                yield row


@contextmanager
def _daemon(device: str, methods: list[str]) -> Iterator[str]:
    """Yield the address of the daemon for all rows; none is started if no method needs one."""
    named = os.environ.get(ADDRESS_VARIABLE, "")
    if OFFLOADS not in methods:
        yield named
        return
    if named:
        with StatusQuery(named) as query:
            query.ask()
        yield named
        return
    if device == "cuda":
        compile_codec()
    pool = min((64 if device == "cuda" else 1) * _GIB, memory_limit() // 2)
    flags = [f"--pool-bytes={pool}", f"--device={device}"]
    with ChildDaemon(flags=flags, start_seconds=_START_SECONDS) as daemon:
        yield daemon.address


def _measured(wanted: dict[str, Any], args: argparse.Namespace, address: str) -> dict[str, Any]:
    """Return a row measured in a process of its own, or the row with {"skipped": reason}."""
    environment = {**os.environ, ADDRESS_VARIABLE: address} if address else None
    ended = run_child(_command(wanted, args), _CHILD_SECONDS, environment)
    if ended.status is None:
        return wanted | {"skipped": f"not done after {_CHILD_SECONDS:g} s"}
    lines = ended.output.splitlines()
    if ended.status == 0 and lines:
        row: dict[str, Any] = json.loads(lines[-1])
        return row
    why = f"its process ended with {ended.status}: {tail(ended.complaints, lines=1)}"
    return wanted | {"skipped": why}


def _command(wanted: dict[str, Any], args: argparse.Namespace) -> list[str]:
    is_storm = wanted["method"] == OFFLOADS
    warm_ups = args.warm_ups if is_storm else min(args.warm_ups, _PLAIN_WARM_UPS)
    return [
        *(sys.executable, "-m", "storm_bench.zoo", wanted["model"], wanted["method"]),
        *(f"--warm-ups={warm_ups}", f"--steps={args.steps}"),
        *([f"--budget={wanted['budget']}"] if is_storm else []),
        *(["--small"] if args.small else []),
    ]


# --- for people -----------------------------------------------------------------------------

_COLUMNS: Final = (
    Column("ms", lambda row: row["ms"], form=".1f"),
    Column("x none", lambda row: row["of_none"]),
    Column("peak GiB", lambda row: row["peak_gib"]),
    Column("reserved beyond", lambda row: row["beyond_gib"]),
    Column("held GiB", lambda row: row["held_gib"]),
    Column("offloaded GiB", lambda row: row["offloaded_gib"]),
    Column("recomputed GiB", lambda row: row["replayed_gib"]),
    Column("settled after", lambda row: row["settled_steps"], form=".0f"),
)


def print_zoo(figures: dict[str, Any]) -> None:
    """Print a table per model, and an explanation of the columns."""
    machine, rows = figures["machine"], figures["rows"]
    for model in dict.fromkeys(row["model"] for row in rows):
        write_line(f"{model}: {MODELS[model]}, {machine['device']}{MPS[machine['mps']]}")
        table = [row for row in rows if row["model"] == model]
        plain = next((row.get("ms") for row in table if row["method"] == "none"), None)
        print_table(((name_of(row), ratio_to(plain, row, "ms")) for row in table), _COLUMNS)
        write_line()
    write_line(
        "ms: median of the measured steps, AdamW included; peak: most bytes in them that PyTorch "
        "allocated, on a CPU resident bytes; reserved beyond: GiB that its allocator held above "
        "that; held: GPU memory of all processes after the last step, the daemon's included; "
        "offloaded, recomputed: in a step; settled after: steps that ran plans until the best was "
        "found"
    )


def _short(row: dict[str, Any]) -> str:
    return in_short(row, row.get("ms", 0), row.get("peak_gib"))
