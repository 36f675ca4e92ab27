"""`stormd upgrade`: replaces the running daemon by the installed version, while trainers run.

Without --force nothing that they have stored is lost. Their steps wait until the new daemon serves.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

from stormd.commands.arguments import add_daemon_arguments, positive_seconds
from stormd.errors import ChildFailed, NoDaemon, UpgradeUnavailable
from stormd.output import EXIT_FAILED, EXIT_OK, write_line
from stormd.query import StatusQuery, find_address

__all__ = ["HELP", "add_arguments", "run"]

HELP = "replace a running daemon by the installed version, while trainers keep running"

_TURN_SECONDS: Final = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_daemon_arguments(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="also if trainers on GPUs have stored entries: those that they do not restore within "
        "shutdown_seconds are lost",
    )
    parser.add_argument(
        "--wait",
        type=positive_seconds,
        default=120.0,
        metavar="SECONDS",
        help="how long the new daemon may take to resume all sessions (default: 120)",
    )


def run(args: argparse.Namespace) -> int:
    """Replace the daemon and print how many sessions continued; return 1 if some did not."""
    address = find_address(args.address)
    before = _state(address, args.timeout)
    _check(before, is_forced=args.force)
    began = time.monotonic()
    _suspend(before)
    after = _replaced(address, before, began + args.wait)
    here = {session["id"] for session in after["sessions"] if not session["orphaned"]}
    gone = [session["id"] for session in before["sessions"] if session["id"] not in here]
    write_line(
        f"stormd {before['version']} (process {before['pid']}) was replaced by {after['version']} "
        f"(process {after['pid']}) within {time.monotonic() - began:.1f} s; "
        f"{len(before['sessions']) - len(gone)} of {len(before['sessions'])} sessions resumed"
    )
    return EXIT_FAILED if gone else EXIT_OK


def _state(address: str, timeout: float) -> dict[str, Any]:
    with StatusQuery(address, timeout=timeout) as query:
        return query.ask()


def _check(state: dict[str, Any], *, is_forced: bool) -> None:
    """Check that no stored entries would be lost, and that the daemon is in this PID namespace.

    With `is_forced`, entries of sessions that cannot be resumed may be lost.

    Raises:
        UpgradeUnavailable: entries would be lost, or the daemon is in another namespace.
    """
    if not state.get("resumable"):
        raise UpgradeUnavailable(
            f"what the daemon at {state['address']} holds would be lost with it: start it with "
            "--resumable, once no trainer needs it"
        )
    bound = [one for one in state["sessions"] if not one["resumable"] and one["entries"]]
    if bound and not is_forced:
        raise UpgradeUnavailable(
            f"{len(bound)} sessions, as of trainers on GPUs, cannot be resumed and have stored "
            "entries: end their trainers first, or drop the entries with --force"
        )
    try:
        words = Path(f"/proc/{state['pid']}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    if b"serve" not in words:
        raise UpgradeUnavailable(
            f"the daemon at {state['address']} is process {state['pid']}, which is no `stormd "
            "serve` here: run this where the daemon runs, as in its container"
        )


def _suspend(state: dict[str, Any]) -> None:
    try:
        os.kill(state["pid"], signal.SIGUSR2)
    except PermissionError as error:
        raise UpgradeUnavailable(
            f"process {state['pid']} is another user's: run this as root or as the daemon's user"
        ) from error
    except ProcessLookupError:  # it has ended since the query: another follows
        return


def _replaced(address: str, before: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Return the next daemon's state, at the deadline or once all sessions have resumed or ended.

    Raises:
        ChildFailed: no other daemon answers by the deadline.
    """
    after: dict[str, Any] | None = None
    while time.monotonic() < deadline:
        try:
            state = _state(address, min(2.0, deadline - time.monotonic() + 0.1))
        except NoDaemon:  # it does not listen yet, or ended during the query
            time.sleep(_TURN_SECONDS)
            continue
        if state["pid"] != before["pid"]:
            after = state
            if not any(session["orphaned"] for session in state["sessions"]):
                return state
        time.sleep(_TURN_SECONDS)
    if after is None:
        raise ChildFailed(
            f"no daemon has followed process {before['pid']} at {address}: see the log of its "
            "service (`journalctl -u stormd`)"
        )
    return after
