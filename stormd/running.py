"""The daemon as a process: its event loop, its signals, and its reports to the service manager.

The daemon reports "ready", in its log and to the manager, only once the pool is pinned and both the
sockets and the operator's endpoint answer. SIGTERM and SIGINT end it in order and within its
deadline. SIGUSR2 ends it for another daemon to take its place. All three work during the start too,
and may be repeated. On SIGHUP the daemon reads its settings file again. Without a file, SIGHUP ends
a daemon whose terminal is gone, and else does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import IO, Final, cast

import uvloop

from stormd import open_files
from stormd.config import Config
from stormd.endpoint import Endpoint
from stormd.errors import ConfigError, StartStopped
from stormd.handover import Handover
from stormd.monitoring.logs import LogQueue, set_level
from stormd.monitoring.metrics import DaemonCollector, health_route, metrics_route
from stormd.notify import Notifier, feed_watchdog, take_kept, watchdog_seconds
from stormd.server import Server
from stormd.sizes import format_size
from stormd.supervise.processes import is_handled

__all__ = ["StartReport", "operated", "reload_settings", "run_daemon"]

log: Final = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
ReadConfig = Callable[[], Config]


def run_daemon(
    config: Config, read: ReadConfig | None = None, terminal: LogQueue | None = None
) -> bool:
    """Run a daemon with these settings until it ends in order; return whether another follows.

    `read` reads the settings again; None if there is no file. `terminal` shows the start's
    progress, if it is a terminal. Afterwards the process should only exit: it ignores the signals
    that ask for an end.

    Raises:
        StormdError: the daemon could not be opened or could not continue; nothing of it is left.
            The signals have their default actions again.
    """
    limit, wanted = open_files.raise_limit(), open_files.limit_for(config.max_sessions)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        log.warning(
            "the limit of open files is %d, and max_sessions=%d may need %d: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE= in a unit), or lower max_sessions",
            limit,
            config.max_sessions,
            wanted,
        )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            is_suspended = runner.run(_serve(config, read, terminal))
    except BaseException:
        _set_signals(signal.SIG_DFL)
        raise
    _set_signals(signal.SIG_IGN)
    return is_suspended


def _set_signals(disposition: signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, disposition)


async def _serve(config: Config, read: ReadConfig | None, terminal: LogQueue | None) -> bool:
    """Open, serve and close; return whether another daemon is to follow.

    A signal to end aborts the start, also while the pool is being pinned.
    """
    within, hung_up = watchdog_seconds(), asyncio.Event()
    _handle_signal(signal.SIGHUP, hung_up.set)
    has_terminal = _has_terminal()
    kept = take_kept()
    with Notifier.from_environment() as notifier:
        handover = Handover(notifier, kept) if config.resumable else None
        with _pinning_progress(notifier, terminal) as progress:
            server = Server(config, on_progress=progress, handover=handover)
            try:
                await _open(server)
            except StartStopped:
                log.info("ended before it was ready")
                return server.is_suspended
        try:
            async with operated(
                server,
                notifier,
                metrics_address=config.metrics_address,
                watchdog_seconds=within,
            ):
                reload = None if read is None else partial(reload_settings, server, notifier, read)
                stop = server.stop if has_terminal else None
                watch = asyncio.create_task(_answer_hang_ups(hung_up, reload, stop))
                try:
                    await server.serve()
                finally:
                    watch.cancel()
        finally:
            await server.close()
    return server.is_suspended


async def _open(server: Server) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        _handle_signal(number, server.stop)
    _handle_signal(signal.SIGUSR2, partial(_suspend, server))
    await server.open()
    gc.freeze()  # else garbage collection scans it while clients wait, for milliseconds each time


def _suspend(server: Server) -> None:
    if not server.suspend():
        log.warning("SIGUSR2 changes nothing: nothing outlives a daemon without --resumable")


def _handle_signal(number: signal.Signals, action: Callable[[], None]) -> None:
    """Make a signal call `action` on the running loop; once the loop is closed it does nothing.

    A loop's own signal handlers end with the loop. A second signal would then kill the exiting
    process, as if it had failed.
    """
    if not is_handled(number):
        return
    loop = asyncio.get_running_loop()

    def handle(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(action)

    signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # the parent process may have blocked it


async def _answer_hang_ups(
    hung_up: asyncio.Event, reload: Callable[[], None] | None, stop: Callable[[], None] | None
) -> None:
    """Handle each SIGHUP; `stop` is None if there was no terminal at the start."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        if reload is not None:
            try:
                reload()
            except Exception:  # our bug, which must not end a serving daemon
                log.exception("settings not reloaded")
        elif stop is not None and not _has_terminal():
            stop()
        else:
            log.warning("SIGHUP changes nothing: there is no --config FILE to be read again")


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal, whose end would end the process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _pinning_progress(notifier: Notifier, terminal: LogQueue | None) -> Iterator[OnProgress]:
    """Show a bar on a terminal while the pool is being pinned; else report to the manager."""
    if terminal is None or not terminal.isatty():
        yield StartReport(notifier)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn

    columns = ("pinning the pool", BarColumn(), DownloadColumn(True), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(file=cast("IO[str]", terminal)), transient=True
    ) as bars:
        task = bars.add_task("pool", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


# --- what an operator's tools see ------------------------------------------------------------

_REPORT_SECONDS: Final = 1.0
"""Least time between two progress reports of the start."""

_MORE_SECONDS: Final = 60.0
"""How long the start may take after a report before it counts as hung."""


@contextlib.asynccontextmanager
async def operated(
    server: Server, notifier: Notifier, *, metrics_address: str, watchdog_seconds: float
) -> AsyncIterator[Endpoint | None]:
    """Show the open `server` to the operator's tools while the block runs.

    Yields the endpoint, None if `metrics_address` is empty. `watchdog_seconds` is 0.0 if no
    manager waits for signs of life.

    Raises:
        AddressInUse: the endpoint cannot listen; nothing was reported as ready.
    """
    async with contextlib.AsyncExitStack() as stack:
        endpoint = None
        if metrics_address:
            endpoint = await _opened_endpoint(server, metrics_address)
            stack.push_async_callback(endpoint.close)
        if watchdog_seconds:
            watchdog = asyncio.create_task(
                feed_watchdog(notifier, watchdog_seconds, server.stuck), name="watchdog"
            )
            stack.push_async_callback(_cancelled, watchdog)
        server.log_ready()
        notifier.ready()
        stack.callback(notifier.stopping)
        yield endpoint


class StartReport:
    """Reports the progress of pinning: to the manager, and its begin in the log.

    Called from the threads that pin.
    """

    def __init__(self, notifier: Notifier, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._notifier = notifier
        self._clock = clock
        # Two threads that pass this time at once send one report too many, which is harmless.
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report `done` of `total` bytes, at most once a second."""
        now = self._clock()
        if not self._next:
            log.info("pinning the pool", extra={"pool": format_size(total)})
        if now >= self._next:
            self._next = now + _REPORT_SECONDS
            text = f"pinning the pool, {format_size(done)} of {format_size(total)}"
            self._notifier.starting(text, _MORE_SECONDS)


def reload_settings(server: Server, notifier: Notifier, read: Callable[[], Config]) -> None:
    """Apply the settings that `read` returns to the server; an invalid file changes nothing."""
    notifier.reloading()
    try:
        config = read()
        ignored = server.reload(config)
    except ConfigError as error:
        log.error("settings not reloaded", extra={"reason": str(error)})  # noqa: TRY400 - the operator's fault, and the reason says all
    else:
        set_level(config.log_level)
        log.info("settings reloaded", extra={"need_restart": ignored})
    notifier.ready()


async def _opened_endpoint(server: Server, address: str) -> Endpoint:
    stuck: Callable[[], Sequence[str]] = server.stuck
    collector = DaemonCollector(status=server.status, counters=lambda: server.counters, stuck=stuck)
    endpoint = Endpoint(
        address, {"/metrics": metrics_route(collector), "/healthz": health_route(stuck)}
    )
    await endpoint.open()
    log.info("metrics served", extra={"metrics_address": address, "port": endpoint.port})
    return endpoint


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
