"""`stormd advise`: runs a training script for some steps and prints what each budget would give.

The script runs under `stormd run`. Its client measures
(`storm_client.monitoring.budget_reports`), and each trainer sends its figures in one datagram. Then
the run is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stormd.errors import ConfigError
from stormd.machine import memory_limit
from stormd.output import EXIT_FAILED, EXIT_OK, plain_console, print_to_stderr, write_json
from stormd.protocol import temporary_directory
from stormd.protocol.variables import ADVISE_VARIABLE, PREFIX
from stormd.sizes import exact_size, format_size, suggested_pool

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run a training script for some steps and print what each budget would give"

_GATHER_SECONDS: Final = 2.0
"""Time to wait for a further trainer after each answer, in addition to a step's own time."""

_END_SECONDS: Final = 20.0
"""Time for a run that was told to end; after that it is killed."""

_ANSWER_BYTES: Final = 1 << 16

_ADVICE: Final = (
    "it has to train that many, with `offload = storm.offload(model)` before its loop and `with "
    "offload:` around each forward pass"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "stormd advise [--json] -- COMMAND ..."
    parser.description = (
        f"{parser.description} The script needs `with offload:` around its forward pass. It is "
        "ended after eight steps, and what it writes goes to standard error."
    )
    parser.epilog = "exit status: 0 done, 1 the script ended before, 2 wrong usage"
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="what to run, behind --"
    )


def run(args: argparse.Namespace) -> int:
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command:
        raise ConfigError("there is no command to run: stormd advise -- python train.py")
    found, status = _answers(command)
    if not found:
        print_to_stderr(
            f"the script ended with status {status} before eight steps were seen"
            + ("" if status else f": {_ADVICE}")
        )
        return EXIT_FAILED
    if args.json:
        write_json({"trainers": found, "pool_bytes": _pool(found)})
    else:
        _print(command, found)
    return EXIT_OK


def _answers(command: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Run the command until its trainers have answered or it has ended.

    Returns the answers, and the run's exit status.
    """
    below = temporary_directory("stormd-advise-12345678/advice")
    with (
        tempfile.TemporaryDirectory(prefix="stormd-advise-", dir=below) as directory,
        closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as listener,
    ):
        path = Path(directory) / "advice"
        listener.bind(str(path))
        environ = {f"{PREFIX}POOL_BYTES": exact_size(memory_limit() // 2), **os.environ}
        environ[ADVISE_VARIABLE] = str(path)
        line = [sys.executable, "-m", "stormd", "run", "--", *command]
        child = subprocess.Popen(  # noqa: S603 - what the user asked for
            line, env=environ, stdout=sys.stderr
        )
        try:
            found = _received(listener, child)
        finally:
            _end(child)
        return found, child.returncode


def _received(listener: socket.socket, child: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Return the trainers' answers, until no further one is expected or the run has ended."""
    found: list[dict[str, Any]] = []
    deadline = None
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(child.pid)) as ended:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while deadline is None or time.monotonic() < deadline:
            left = None if deadline is None else deadline - time.monotonic()
            ready = [key.fileobj for key, _ in selector.select(left)]
            if listener in ready:
                found.append(json.loads(listener.recv(_ANSWER_BYTES)))
                deadline = time.monotonic() + _GATHER_SECONDS + found[0]["step_seconds"]
            elif ready:
                break
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the run in order, so that it ends all processes that the command started."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _pool(found: list[dict[str, Any]]) -> int:
    """Return the pool for all trainers; their first steps offload what later ones recompute."""
    return suggested_pool(int(sum(one["saved_bytes"] / one["ratio"] for one in found)))


def _print(command: list[str], found: list[dict[str, Any]]) -> None:
    first = found[0]
    console = plain_console()
    console.print(
        f"trainer 1 of {len(found)}, on {first['device']}: a step takes "
        f"{_ms(first['step_seconds'])} and saves {format_size(first['saved_bytes'])} in large "
        f"tensors"
        + (f", at a peak of {format_size(first['peak_bytes'])}" if first["peak_bytes"] else "")
    )
    if not first["saved_bytes"]:
        console.print("nothing can be offloaded: no saved tensor is large enough")
        return
    rate = first["link_bytes_per_second"]
    console.print(
        f"forward pass {_ms(first['forward_seconds'])}; "
        + (f"link {rate / 1e9:.1f} GB/s of tensors each way, " if rate else "")
        + f"ratio {first['ratio']:.2f}"
    )
    console.print(_table(first["budgets"]))
    pool = exact_size(_pool(found))
    on_gpu = first["device"].startswith("cuda")
    waits = "beyond the forward pass" if on_gpu else "both ways, which a CPU does not overlap"
    console.print(
        f"wait: the predicted transfer time {waits}. The first steps offload what later ones "
        "recompute, so this command has a larger pool than the table. Replace its budget by the "
        "largest one that fits into memory:"
    )
    line = f"stormd run --pool-bytes {pool} --budget least -- {shlex.join(command)}"
    console.print(line, soft_wrap=True)  # to be copied


def _table(budgets: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    sizes = ("kept", "offloaded", "recomputed")
    times = ("link ms", "wait ms", "recompute ms")
    table = Table("budget", *sizes, *times, "pool", box=None, pad_edge=False, collapse_padding=True)
    for one in budgets:
        table.add_row(
            str(one["budget"]),
            *(format_size(one[f"{name}_bytes"]) for name in ("keep", "offload", "replay")),
            *(f"{1e3 * one[f'{name}_seconds']:.1f}" for name in ("link", "wait", "replay")),
            format_size(one["pool_bytes"]),
        )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
