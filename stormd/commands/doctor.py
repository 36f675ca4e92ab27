"""`stormd doctor`: checks the machine and says what to do.

The exit status is 1 exactly when a check failed. A warning leaves it at 0.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Final

from stormd.doctor import Finding, examine
from stormd.machine import describe
from stormd.output import EXIT_FAILED, EXIT_OK, write_json
from stormd.settings import load_config

__all__ = ["HELP", "add_arguments", "run"]

HELP = "check driver, memory, limits, permissions and codec, and say what to do"

_COLOURS: Final = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the daemon's settings file (default: none)"
    )
    parser.add_argument(
        "--address", metavar="ipc:///PATH", help="the daemon's socket (default: as for serve)"
    )
    parser.add_argument(
        "--pool-bytes", metavar="SIZE", help="the daemon's pool (default: as for serve)"
    )
    parser.add_argument(
        "--device", metavar="{auto,cpu,cuda}", help="the daemon's lanes (default: as for serve)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    names = ("address", "pool_bytes", "device")
    flags = {name: getattr(args, name) for name in names}
    findings = examine(load_config(flags=flags, path=args.config))
    failed = any(finding.state == "fail" for finding in findings)
    if args.json:
        checks = [asdict(finding) for finding in findings]
        write_json({"passed": not failed, "checks": checks, "machine": describe()})
    else:
        _print_table(findings)
    return EXIT_FAILED if failed else EXIT_OK


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    # Folded, as a truncated command or path is useless.
    texts = (Column(title, overflow="fold") for title in ("found", "what to do"))
    table = Table("check", "", *texts, box=None)
    for finding in findings:
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(Text(finding.check), state, Text(finding.detail), Text(finding.advice))
    Console().print(table)
