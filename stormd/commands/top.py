"""`stormd top`: a live view of a running daemon.

Each view shows one answer of the daemon, with rates since the answer before. The command ends with
status 3 as soon as the daemon does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from typing import TYPE_CHECKING, Any

from stormd.commands.arguments import add_daemon_arguments, positive_int, positive_seconds
from stormd.output import EXIT_OK, plain_console, write_line
from stormd.query import StatusQuery, find_address

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HELP", "add_arguments", "run"]

HELP = "watch pool, sessions and rates of a running daemon"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)
    parser.add_argument(
        "--interval",
        type=positive_seconds,
        default=1.0,
        metavar="SECONDS",
        help="time between looks",
    )
    parser.add_argument(
        "--count", type=positive_int, metavar="N", help="end after N looks (default: on interrupt)"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each look")


def run(args: argparse.Namespace) -> int:
    address = find_address(args.address)
    with StatusQuery(address, timeout=args.timeout) as query:
        states = _states(query, args.interval, args.count)
        try:
            _print_json(states) if args.json else _show(address, states)
        except KeyboardInterrupt:
            return EXIT_OK  # the usual way to leave a live view
    return EXIT_OK


def _states(
    query: StatusQuery, interval: float, count: int | None
) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any]]]:
    """Yield the previous and the present state; the first time, the previous one is None."""
    before: dict[str, Any] | None = None
    pause = threading.Event()
    looks = 0
    while True:
        now = query.ask()
        yield before, now
        before, looks = now, looks + 1
        if looks == count:
            return
        pause.wait(interval)


def _print_json(states: Iterator[tuple[dict[str, Any] | None, dict[str, Any]]]) -> None:
    from dataclasses import asdict

    from stormd.commands.status_view import rates_between

    for before, now in states:
        rates = rates_between(before, now) if before else None
        write_line(json.dumps({**now, "rates": asdict(rates) if rates else None}))
        sys.stdout.flush()  # so that the reader of a pipe gets each look at once


def _show(address: str, states: Iterator[tuple[dict[str, Any] | None, dict[str, Any]]]) -> None:
    """Show each view in place of the last, or below it if the output is not a terminal."""
    from rich.live import Live

    from stormd.commands.status_view import rates_between, status_view

    console = plain_console()
    views = (
        status_view(address, now, rates_between(before, now) if before else None)
        for before, now in states
    )
    if not console.is_terminal:
        for view in views:
            console.print(view)
        return
    with Live(console=console, auto_refresh=False, screen=False) as live:
        for view in views:
            live.update(view, refresh=True)
