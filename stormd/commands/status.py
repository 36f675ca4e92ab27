"""`stormd status`: prints the state of a running daemon once.

With `--json` it prints the daemon's own state object unchanged. The table shows the same
figures for people.
"""

from __future__ import annotations

import argparse
from typing import Any

from stormd.commands.arguments import add_daemon_arguments
from stormd.output import EXIT_OK, plain_console, write_json
from stormd.query import StatusQuery, find_address

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show pool, sessions, ratio and throughput of a running daemon"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the state as JSON")


def run(args: argparse.Namespace) -> int:
    address = find_address(args.address)
    with StatusQuery(address, timeout=args.timeout) as query:
        state = query.ask()
    if args.json:
        write_json(state)
    else:
        _print_tables(address, state)
    return EXIT_OK


def _print_tables(address: str, state: dict[str, Any]) -> None:
    from stormd.commands.status_view import status_view

    plain_console().print(status_view(address, state))
