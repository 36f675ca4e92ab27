"""The daemon as a process: its loop, its signals, and what its manager is told of the start.

The daemon says "ready" only once the pool is pinned and the socket answers. SIGTERM and SIGINT end
it in order and within its deadline, also while it is starting. SIGHUP has it read its settings file
again. Without a file it ends it too, as a closed terminal does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

import uvloop

from stormd.config import Config
from stormd.notify import Notifier, watchdog_seconds
from stormd.open_files import raise_limit
from stormd.operation import StartReport, operated, reload_settings
from stormd.server import Server

__all__ = ["run_daemon"]

OnProgress = Callable[[int, int], None]
ReadConfig = Callable[[], Config]


def run_daemon(config: Config, read: ReadConfig | None = None) -> None:
    """Run a daemon of these settings; return once it has ended in order.

    `read` reads the settings again, None where there is no file to read them from.

    Raises:
        StormdError: the daemon could not be opened; nothing of it is left.
    """
    raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, read))


async def _serve(config: Config, read: ReadConfig | None) -> None:
    """Open, serve and close; a signal that comes while the pool is pinned ends it right after."""
    within = watchdog_seconds()
    with Notifier.from_environment() as notifier:
        server = await _opened(config, notifier)
        try:
            async with operated(
                server,
                notifier,
                metrics_address=config.metrics_address,
                watchdog_seconds=within,
            ):
                if read is not None:
                    asyncio.get_running_loop().add_signal_handler(
                        signal.SIGHUP, reload_settings, server, notifier, read
                    )
                await server.serve()
        finally:
            await server.close()


async def _opened(config: Config, notifier: Notifier) -> Server:
    with _pinning_progress(notifier) as progress:
        server = Server(config, on_progress=progress)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, server.stop)
        await server.open()
    return server


@contextlib.contextmanager
def _pinning_progress(notifier: Notifier) -> Iterator[OnProgress]:
    """Show a bar on a terminal while the pool is being pinned; tell the manager elsewhere."""
    if not sys.stderr.isatty():
        yield StartReport(notifier)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn

    columns = ("pinning the pool", BarColumn(), DownloadColumn(True), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("pool", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
