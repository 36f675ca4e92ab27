"""The worker processes as the front sees them: started, given sessions, watched, ended.

A worker that ends takes only its own sessions with it, and another is started in its place. A
worker that hangs is killed first. No worker outlives the front: the kernel kills each when the
front ends, for whatever reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

from stormd import errors
from stormd.config import Config
from stormd.errors import LaneUnavailable, StartStopped, StormdError
from stormd.lanes import Lane, Post
from stormd.memory.shared_rows import MAX_USERS, Rows
from stormd.monitoring.counters import Counters
from stormd.protocol import Hello
from stormd.workers.channel import WorkerChannel
from stormd.workers.plan import Plan, worker_config

__all__ = ["Fleet", "Worker"]

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 1.0
"""How long workers have to report their state; a worker that does not is shown with its last
state."""

FIRST_DELAY: Final = 0.1
MAX_DELAY: Final = 5.0
"""Delays before a worker that ended soon after its start is started again, doubled each time."""

BRIEF_SECONDS: Final = 10.0
"""A worker that has served for longer is started again at once."""

SILENT_TICKS: Final = 60
"""Calls of `tick`, twice a second, for which a worker may be silent. Ticks instead of seconds: a
front that was stopped itself has not waited for any worker meanwhile."""

KILL_SECONDS: Final = 5.0
"""Time beyond a shutdown's deadline for workers to free their memory; then they are killed."""

NOT_FOR_WORKERS: Final = (
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES",
)  # fmt: skip
"""Variables of the front's service manager, which does not know the workers."""

OnSession = Callable[[int, str], None]


class Phase(Enum):
    """The state of a worker."""

    STARTING = auto()
    """Its process exists; messages to it wait until it serves."""
    SERVING = auto()
    ENDED = auto()
    """It has no process: another is started, unless all workers are to end."""


class Worker(Lane):
    """One worker: its sessions and its reports; a lane of the front's ledger."""

    def __init__(self, plan: Plan, post: Post, columns: dict[int, int]) -> None:
        super().__init__(post)
        self.plan = plan
        self._columns = columns
        self.phase = Phase.ENDED
        self.process: subprocess.Popen[bytes] | None = None
        self.channel: WorkerChannel | None = None
        self.starts = 0
        self.began = 0.0
        self.delay = 0.0
        self.trouble = ""
        """Why its last start failed, or why its last process ended."""
        self.sessions: set[int] = set()
        """Sessions that were handed over to the worker and not reported as ended."""
        self.ending: set[int] = set()
        """Those of `sessions` that the front has ended."""
        self.state: dict[str, Any] | None = None
        self.counters: Counters | None = None
        self.silent_ticks = 0
        self.asked = self.answered = 0
        """The last rounds in which it was asked for its state, and in which it answered."""
        self.pinned = (0, 0)

    def send(self, kind: str, *values: Any) -> None:
        """Send the worker a message; one that has ended gets none."""
        if self.channel is not None:
            self.channel.send(kind, *values)

    def hand_over(
        self, session: int, uid: int, frame: bytes, connection: tuple[int, bytes]
    ) -> None:
        """Make the worker continue a connection whose Hello is in `frame`."""
        descriptor, unread = connection
        assert self.channel is not None, "a session was given to a worker that has ended"
        self.sessions.add(session)
        column = self._columns.setdefault(uid, len(self._columns))
        self.channel.send("session", session, uid, column, frame, unread, descriptor=descriptor)

    def detach(self, session: int) -> None:
        """Make the worker end a session; Detached is posted once it has."""
        if session not in self.sessions:
            super().detach(session)
            return
        self.ending.add(session)
        self.send("end", session)

    def ended(self, session: int) -> bool:
        """Note that a session has ended there; return False if the front ended it and waits."""
        self.sessions.discard(session)
        if session in self.ending:
            self.ending.discard(session)
            super().detach(session)
            return False
        return True

    def take_state(self, state: dict[str, Any]) -> None:
        """Note the state that the worker reports."""
        self.state = state
        self.counters = Counters.of(state["counters"])

    def as_status(self) -> dict[str, Any]:
        """Return the worker's part of the status."""
        own = (self.state or {}).get("worker", {})
        return {
            "index": self.plan.index,
            "pid": 0 if self.process is None else self.process.pid,
            "devices": [f"cuda:{one}" for one in self.plan.ordinals] or ["cpu"],
            "uuids": list(self.plan.uuids),
            "phase": self.phase.name.lower(),
            "starts": self.starts,
            "trouble": self.trouble,
            "sessions": len(self.sessions),
            "numa_node": own.get("numa_node", -1),
            "processor_seconds": own.get("processor_seconds", 0.0),
            "pool": (self.state or {}).get("status", {}).get("pool"),
        }


class Fleet:
    """All workers of a front. `open` before anything else, `close` at the end; on the loop.

    `on_session(session, cause)` is called for each session that has its lifeline, with "attached",
    and for each that has ended. `on_progress(done, total)` gets the bytes that are pinned.
    `on_change` is called after anything that may have changed `is_idle`. `status` returns the state
    of all processes as last reported, for clients that ask a worker. `lifeline_of` returns the path
    of each worker's lifelines.
    """

    def __init__(
        self,
        config: Config,
        plans: list[Plan],
        *,
        loop: asyncio.AbstractEventLoop,
        post: Post,
        lifeline_of: Callable[[int], Path],
        on_session: OnSession,
        status: Callable[[], dict[str, Any]],
        on_change: Callable[[], None],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._config = config
        self._loop = loop
        self._lifeline_of = lifeline_of
        self._on_session = on_session
        self._state_of_all = status
        self._on_change = on_change
        self._on_progress = on_progress
        self._columns: dict[int, int] = {}
        self._workers = [Worker(plan, post, self._columns) for plan in plans]
        self._by_uuid = {uuid: one for one in self._workers for uuid in one.plan.uuids}
        self._retired = Counters()
        self._round = 0
        self._round_ends: asyncio.TimerHandle | None = None
        self._asking: list[Callable[[], None]] = []  # callbacks of the current round
        self._waiting: list[Callable[[], None]] = []  # callbacks of the next round
        self._restarts: dict[int, asyncio.TimerHandle] = {}
        self._reaping: set[asyncio.Task[None]] = set()
        self._is_open = False  # until then a worker that ends is not replaced
        self._is_ending = False
        self._settled = asyncio.Event()
        self._shared = Rows.make(len(plans))
        self._rows = Rows(self._shared, len(plans), own=0)

    # --- beginning and end ------------------------------------------------------------------

    async def open(self, stopping: asyncio.Event) -> None:
        """Start all workers; return once all of them serve.

        Raises:
            StartStopped: `stopping` was set before.
            StormdError: a worker cannot serve; the type says whose fault it is. `kill` must follow.
        """
        for worker in self._workers:
            self._start(worker)
        stop = self._loop.create_task(stopping.wait())
        try:
            while any(worker.phase is not Phase.SERVING for worker in self._workers):
                if stopping.is_set():
                    raise StartStopped("told to end while workers were starting")
                troubles = [one.trouble for one in self._workers if one.phase is Phase.ENDED]
                if any(troubles):
                    raise _error_of(next(filter(None, troubles)))
                self._settled.clear()
                settled = self._loop.create_task(self._settled.wait())
                await asyncio.wait((stop, settled), return_when=asyncio.FIRST_COMPLETED)
                settled.cancel()
        finally:
            stop.cancel()
        self._is_open = True

    def drain(self) -> None:
        """Make all workers end in order, each by the deadline of its shutdown; start no more."""
        self._is_ending = True
        for timer in self._restarts.values():
            timer.cancel()
        for worker in self._workers:
            worker.send("stop")

    async def close(self, deadline: float) -> None:
        """Wait for all workers to end, and kill those that miss the deadline. Twice is fine.

        `deadline` is a time of time.monotonic.
        """
        self.drain()
        for worker in self._workers:
            if worker.process is not None:
                left = max(0.0, deadline + KILL_SECONDS - time.monotonic())
                try:
                    await asyncio.to_thread(worker.process.wait, left)
                except subprocess.TimeoutExpired:
                    log.warning("a worker does not end and is killed", extra=_fields(worker))
        self.kill()

    def kill(self) -> None:
        """End all workers that are left at once. Calling it twice is fine."""
        self._is_ending = True
        for timer in (self._round_ends, *self._restarts.values()):
            if timer is not None:
                timer.cancel()
        for worker in self._workers:
            if worker.channel is not None:
                worker.channel.close()
            if worker.process is not None:
                worker.process.kill()
                worker.process.wait()
                self._lifeline_of(worker.plan.index).unlink(missing_ok=True)
        if self._shared >= 0:
            self._rows.close()
            os.close(self._shared)
            self._shared = -1

    def reload(self, config: Config) -> None:
        """Make all workers apply the reloadable settings of `config`.

        Raises:
            ConfigError: a worker's part does not fit; nothing has changed.
        """
        plans = [worker.plan for worker in self._workers]
        parts = [asdict(worker_config(config, plan, len(plans))) for plan in plans]
        self._config = config
        for worker, part in zip(self._workers, parts, strict=True):
            worker.send("reload", part)

    # --- sessions ---------------------------------------------------------------------------

    @property
    def devices(self) -> frozenset[str]:
        """The names of protocol.DEVICES for which workers have lanes."""
        return frozenset(("cpu", "cuda") if self._by_uuid else ("cpu",))

    def lane_for(self, hello: Hello) -> Worker:
        """Return the worker of a session's GPU; for the cpu lane the one with the fewest sessions.

        Raises:
            LaneUnavailable: no worker serves its device, now or ever.
        """
        if len(self._columns) >= MAX_USERS and hello.uid not in self._columns:
            raise LaneUnavailable(f"{MAX_USERS} users have had sessions: restart the daemon")
        if hello.device == "cuda":
            worker = self._by_uuid.get(hello.device_uuid)
            if worker is None:
                raise LaneUnavailable(
                    f"this daemon does not serve the GPU {hello.device_uuid or 'without a UUID'}, "
                    f"only {', '.join(self._by_uuid)}: check CUDA_VISIBLE_DEVICES on both sides"
                )
        else:
            there = self._serving() or [one for one in self._workers if one.channel is not None]
            worker = min(there or self._workers, key=lambda one: len(one.sessions))
        if worker.channel is None:
            raise LaneUnavailable(
                f"the worker for {worker.plan.name} has ended and is started again"
                f"{worker.trouble and ': ' + worker.trouble}; connect again in some seconds"
            )
        return worker

    @property
    def is_idle(self) -> bool:
        """Whether no worker has a session."""
        return not any(worker.sessions for worker in self._workers)

    # --- what the operator sees -------------------------------------------------------------

    def refresh(self, then: Callable[[], None]) -> None:
        """Call `then` once all earlier work of the workers is known, or after a second."""
        self._waiting.append(then)
        if self._round_ends is None:
            self._begin_round()

    def tick(self) -> None:
        """Ask workers for their state, and kill those that are of no use; call it twice a second.

        These are workers that hang, or whose device is broken.
        """
        for worker in self._serving():
            assert worker.process is not None
            worker.silent_ticks += 1
            stuck = (worker.state or {}).get("stuck", [])
            if stuck or worker.silent_ticks > SILENT_TICKS:
                reason = "; ".join(stuck) or f"no message for {SILENT_TICKS // 2} s"
                log.error("killing an unresponsive worker: %s", reason, extra=_fields(worker))
                worker.process.kill()
        if self._round_ends is None:
            self._begin_round()

    def states(self) -> list[dict[str, Any]]:
        """Return the last known state of each worker."""
        return [one.state["status"] for one in self._workers if one.state is not None]

    def status(self) -> list[dict[str, Any]]:
        """Return the status of each worker."""
        return [worker.as_status() for worker in self._workers]

    def counters(self, own: Counters) -> Counters:
        """Return the counters of the front, the workers, and earlier workers, added up."""
        merged = Counters.of(asdict(own))
        for counters in (self._retired, *(one.counters for one in self._workers)):
            if counters is not None:
                merged.add_work(counters)
        return merged

    def _begin_round(self) -> None:
        """Begin a round: ask all workers, and end the round once they have answered."""
        self._round += 1
        self._asking, self._waiting = self._waiting, []
        self._round_ends = self._loop.call_later(REFRESH_SECONDS, self._end_round)
        for worker in self._serving():
            if worker.asked == worker.answered:  # else a question is pending already
                worker.asked = self._round
                worker.send("report", self._round)
        self._end_round_if_answered()

    def _end_round_if_answered(self) -> None:
        if all(worker.answered >= self._round for worker in self._serving()):
            self._end_round()

    def _end_round(self) -> None:
        if self._round_ends is None:
            return
        self._round_ends.cancel()
        self._round_ends = None
        asking, self._asking = self._asking, []
        for then in asking:
            then()
        if self._waiting:
            self._begin_round()

    def _serving(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.phase is Phase.SERVING]

    # --- a worker's life --------------------------------------------------------------------

    def _start(self, worker: Worker) -> None:
        ours, its = socket.socketpair()
        command = [sys.executable, "-m", "stormd.worker", str(its.fileno()), str(os.getpid())]
        environ = {name: text for name, text in os.environ.items() if name not in NOT_FOR_WORKERS}
        try:
            worker.process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                env=environ,
                stdin=subprocess.PIPE,
                pass_fds=(its.fileno(), self._shared),
            )
        except OSError as error:
            ours.close()
            worker.trouble = f"its process cannot be started: {error.strerror}"
            self._start_later(worker)
            return
        finally:
            its.close()
        worker.starts += 1
        worker.phase, worker.began, worker.trouble = Phase.STARTING, time.monotonic(), ""
        order = {
            "config": asdict(self._settings(worker)),
            "index": worker.plan.index,
            "workers": len(self._workers),
            "ordinals": worker.plan.ordinals,
            "lifeline": str(self._lifeline_of(worker.plan.index)),
            "shared": self._shared,
        }
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError), worker.process.stdin as given:  # its channel tells its end
            given.write(json.dumps(order).encode())
        worker.channel = WorkerChannel(
            self._loop,
            ours,
            lambda kind, values, _descriptor: self._handle_message(worker, kind, values),
            lambda: self._lost(worker),
        )

    def _settings(self, worker: Worker) -> Config:
        return worker_config(self._config, worker.plan, len(self._workers))

    def _handle_message(self, worker: Worker, kind: str, values: list[Any]) -> None:
        worker.silent_ticks = 0
        if kind == "report":
            worker.answered = values[0]
            worker.take_state(values[1])
            self._end_round_if_answered()
        elif kind == "ask":
            self.refresh(lambda: worker.send("state", self._state_of_all()))
        elif kind == "attached":
            self._on_session(values[0], kind)
        elif kind == "ended":
            session, cause = values
            if worker.ended(session):
                self._on_session(session, cause)
            self._on_change()
        elif kind == "pinning":
            worker.pinned = values[0], values[1]
            if self._on_progress is not None:
                done, total = (sum(one.pinned[n] for one in self._workers) for n in (0, 1))
                self._on_progress(done, total)
        elif kind == "ready":
            worker.phase, worker.began = Phase.SERVING, time.monotonic()
            worker.asked = worker.answered = self._round
            worker.take_state(values[0])
            self._settled.set()
            log.info("a worker serves", extra=_fields(worker))
        else:
            assert kind == "failed", f"a worker said {kind!r}"
            worker.trouble = values[0]

    def _lost(self, worker: Worker) -> None:
        """End the sessions of a worker that is gone, and start another in its place."""
        served = worker.phase is Phase.SERVING
        worker.phase, worker.channel = Phase.ENDED, None
        assert worker.process is not None
        worker.process.kill()  # without its line it is of no use
        reap = self._loop.create_task(self._reap(worker, worker.process, served=served))
        self._reaping.add(reap)
        reap.add_done_callback(self._reaping.discard)
        for session in list(worker.sessions):
            if worker.ended(session):
                self._on_session(session, "failed")
        if worker.counters is not None:
            self._retired.add_work(worker.counters)
        worker.counters = worker.state = None
        self._end_round_if_answered()
        self._on_change()

    async def _reap(
        self, worker: Worker, process: subprocess.Popen[bytes], *, served: bool
    ) -> None:
        status = await asyncio.to_thread(process.wait)
        worker.process = None
        if self._shared >= 0:
            self._rows.clear(worker.plan.index)
        if self._is_ending:
            return
        reason = worker.trouble or _how_ended(status)
        log.error("a worker has ended: %s", reason, extra={**_fields(worker), "pid": process.pid})
        worker.trouble = reason
        has_served_long = served and time.monotonic() - worker.began > BRIEF_SECONDS
        worker.delay = 0.0 if has_served_long else worker.delay
        self._settled.set()
        if self._is_open:
            self._start_later(worker)

    def _start_later(self, worker: Worker) -> None:
        if self._is_ending:
            return
        delay, worker.delay = worker.delay, min(MAX_DELAY, max(FIRST_DELAY, 2 * worker.delay))
        self._restarts[worker.plan.index] = self._loop.call_later(delay, self._start, worker)


def _how_ended(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _fields(worker: Worker) -> dict[str, Any]:
    pid = 0 if worker.process is None else worker.process.pid
    return {"worker": worker.plan.index, "device": worker.plan.name, "pid": pid}


def _error_of(trouble: str) -> StormdError:
    """Return the error that a worker has reported as `Name: text`."""
    name, _, text = trouble.partition(": ")
    kind: Any = getattr(errors, name, None)
    if kind is errors.ConfigError:
        return kind(f"{text}; each worker has an equal part of all: or set workers=off")
    if isinstance(kind, type) and issubclass(kind, StormdError):
        return kind(text)
    return LaneUnavailable(f"a worker process ended at its start: {trouble}")
