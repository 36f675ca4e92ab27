"""A worker: the process that serves some devices' sessions for the front that has started it.

    python -m stormd.worker DESCRIPTOR PID

It is a daemon without an address. The front writes its settings to its standard input, and sends
it each session's connection through a socket pair. The worker reports when a session attaches and
ends. It ends when the front tells it to, and is killed when the front ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop

from stormd import open_files
from stormd.config import Config
from stormd.errors import StartStopped, StormdError
from stormd.memory.growth import FIRST_BYTES
from stormd.memory.numa import near_gpus, prefer_node
from stormd.memory.shared_rows import PoolBudget, Rows, UserTotals
from stormd.monitoring.logs import logging_process, set_level
from stormd.output import EXIT_FAILED, EXIT_OK
from stormd.server import Server
from stormd.supervise.processes import die_with_parent
from stormd.workers.channel import WorkerChannel
from stormd.workers.plan import WorkerPlace, config_of, shares_pool

__all__ = ["main"]

REPORT_SECONDS: Final = 0.5
"""Least time between two reports of the progress of pinning."""


def main(arguments: list[str]) -> int:
    """Serve until told to end; return the exit status."""
    descriptor, parent = map(int, arguments)
    die_with_parent(signal.SIGKILL, parent)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):  # meant for the front
        signal.signal(number, signal.SIG_IGN)
    text = sys.stdin.read()
    if not text:  # the front has ended
        return EXIT_FAILED
    order, end = json.loads(text), socket.socket(fileno=descriptor)
    config = config_of(order["config"])
    with logging_process(config.log_format, config.log_level, sys.stderr.fileno()):
        _name_lines(order["index"])
        open_files.raise_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Worker(config, order, end).run())


class _Worker:
    """One worker on its loop."""

    def __init__(self, config: Config, order: dict[str, Any], end: socket.socket) -> None:
        self._node = prefer_node(near_gpus(order["ordinals"]))
        rows = Rows(order["shared"], order["workers"], order["index"])
        os.close(order["shared"])
        self._totals = UserTotals(rows)
        self._budget: PoolBudget | None = None
        if shares_pool(config):
            self._budget = PoolBudget(rows, order["workers"], config.host_bytes, FIRST_BYTES)
        self._sessions: set[int] = set()
        self._asked: list[Callable[[dict[str, Any]], None]] = []  # await the front's answer
        self._not_asked: list[Callable[[dict[str, Any]], None]] = []  # await the one after it
        self._end = end
        self._channel: WorkerChannel
        self._pinned = 0.0
        place = WorkerPlace(
            lifeline=Path(order["lifeline"]),
            ordinals=tuple(order["ordinals"]),
            totals=self._totals,
            budget=self._budget,
            on_session=self._report_session,
            provide_status=self._request_status,
        )
        self._server = Server(config, on_progress=self._pinning, worker=place)
        self._kinds: dict[str, Callable[..., None]] = {
            "end": self._server.end_session,
            "report": self._report,
            "reload": self._reload,
            "state": self._answer,
        }
        self._waiting: list[tuple[str, list[Any], int]] = []  # received before the server was open
        self._serves = False

    async def run(self) -> int:
        """Open, serve and close."""
        loop = self._loop = asyncio.get_running_loop()
        self._channel = WorkerChannel(loop, self._end, self._handle_message, self._front_ended)
        loop.add_signal_handler(signal.SIGTERM, self._server.stop)
        try:
            await self._server.open()
        except StartStopped:
            return EXIT_OK
        except StormdError as error:
            self._channel.send("failed", f"{type(error).__name__}: {error}")
            return EXIT_FAILED
        gc.freeze()
        self._channel.send("ready", self._state())
        self._serves = True
        waiting, self._waiting = self._waiting, []
        for kind, values, descriptor in waiting:
            self._handle_message(kind, values, descriptor)
        try:
            await self._server.serve()
        finally:
            await self._server.close()
            self._channel.close()
        return EXIT_OK

    # --- messages from the front ------------------------------------------------------------

    def _handle_message(self, kind: str, values: list[Any], descriptor: int) -> None:
        if kind == "stop":
            self._server.stop()
        elif not self._serves:
            self._waiting.append((kind, values, descriptor))
        elif kind == "session":
            self._take_session(descriptor, values)
        else:
            self._kinds[kind](*values)

    def _front_ended(self) -> None:
        """Kill this process, as the front is gone, if the kernel has not done so yet."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _take_session(self, descriptor: int, values: list[Any]) -> None:
        session, uid, column, frame, unread = values
        self._totals.set_column(uid, column)
        self._record_session(session, is_there=True)
        line = socket.socket(fileno=descriptor)
        if not self._server.take_session(line, session, frame, unread):
            self._report_session(session, "failed")

    def _reload(self, fields: dict[str, Any]) -> None:
        config = config_of(fields)
        self._server.reload(config)
        set_level(config.log_level)

    def _report(self, number: int) -> None:
        self._channel.send("report", number, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "status": self._server.status(),
            "counters": asdict(self._server.counters),
            "stuck": self._server.stuck(),
            "worker": {"numa_node": self._node, "processor_seconds": time.process_time()},
        }

    def _request_status(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Ask the front for the state of all processes: a client may ask any of them for it.

        One question is under way at a time, and answers all who had asked before it was sent.
        """
        self._not_asked.append(tell)
        if not self._asked:
            self._ask()

    def _ask(self) -> None:
        self._asked, self._not_asked = self._not_asked, []
        self._channel.send("ask")

    def _answer(self, state: dict[str, Any]) -> None:
        asked, self._asked = self._asked, []
        if self._not_asked:
            self._ask()
        for tell in asked:
            tell(state)

    # --- messages to the front --------------------------------------------------------------

    def _report_session(self, session: int, cause: str) -> None:
        if cause == "attached":
            self._channel.send("attached", session)
        else:
            self._record_session(session, is_there=False)
            self._channel.send("ended", session, cause)

    def _record_session(self, session: int, *, is_there: bool) -> None:
        """Note a session's start or end: while there is one, this worker keeps its share."""
        (self._sessions.add if is_there else self._sessions.discard)(session)
        if self._budget is not None:
            self._budget.set_has_session(is_busy=bool(self._sessions))

    def _pinning(self, done: int, total: int) -> None:
        """Report the progress of pinning to the front; called from the threads that pin."""
        now = time.monotonic()
        if now > self._pinned or done == total:
            self._pinned = now + REPORT_SECONDS
            self._loop.call_soon_threadsafe(partial(self._channel.send, "pinning", done, total))


def _name_lines(index: int) -> None:
    """Add the worker's index to each log line of this process; the front logs about sessions."""

    def name(record: logging.LogRecord) -> bool:
        record.worker = index
        return True

    logging.getLogger("stormd.gateway").setLevel(logging.WARNING)
    for handler in logging.getLogger("stormd").handlers:
        handler.addFilter(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
