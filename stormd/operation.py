"""What an operator's tools see of a serving daemon: readiness, signs of life, metrics, health.

"Ready" is said after everything an operator asked for works, the endpoint
included, and "stopping" before anything is taken down. None of it outlives the `async with`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Protocol

from stormd.config import Config
from stormd.endpoint import Endpoint
from stormd.errors import ConfigError
from stormd.monitoring.counters import Counters
from stormd.monitoring.logs import set_level
from stormd.monitoring.metrics import DaemonCollector, health_route, metrics_route
from stormd.notify import Notifier, feed_watchdog
from stormd.sizes import format_size

__all__ = ["Operated", "StartReport", "operated", "reload_settings"]

_LOGGER: Final = logging.getLogger("stormd.operation")

_REPORT_SECONDS: Final = 1.0
"""Least time between two reports of how far the start has come."""

_MORE_SECONDS: Final = 60.0
"""How long the start may take from one report on before it counts as hung."""


class Operated(Protocol):
    """The part of Server that is looked at; all of it is called on the event loop."""

    @property
    def counters(self) -> Counters:
        """The counts since the start."""

    def status(self) -> dict[str, Any]:
        """The object of `stormd status --json`."""

    def stuck(self) -> list[str]:
        """One sentence for each worker that hangs or has ended."""

    def reload(self, config: Config) -> list[str]:
        """Take what can be taken while serving; return the options that need a restart.

        Raises:
            ConfigError: the new limits do not go with the pool there is; nothing has changed.
        """


@contextlib.asynccontextmanager
async def operated(
    server: Operated, notifier: Notifier, *, metrics_address: str, watchdog_seconds: float
) -> AsyncIterator[Endpoint | None]:
    """Show the open `server` to the operator's tools while the block runs.

    Yields the endpoint, None where `metrics_address` is empty. `watchdog_seconds` is 0.0 where
    no manager waits for signs of life.

    Raises:
        AddressInUse: the endpoint cannot listen; nothing was said to the manager.
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
        notifier.ready()
        stack.callback(notifier.stopping)
        yield endpoint


class StartReport:
    """Tells the manager how far pinning has come; called from the threads that pin."""

    def __init__(self, notifier: Notifier, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._notifier = notifier
        self._clock = clock
        # Two threads that pass it at once send one report too many, which does no harm.
        self._next = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Report `done` of `total` bytes, at most once a second."""
        now = self._clock()
        if now >= self._next:
            self._next = now + _REPORT_SECONDS
            text = f"pinning the pool, {format_size(done)} of {format_size(total)}"
            self._notifier.starting(text, _MORE_SECONDS)


def reload_settings(server: Operated, notifier: Notifier, read: Callable[[], Config]) -> None:
    """Have the server take the settings that `read` returns; a bad file changes nothing."""
    notifier.reloading()
    try:
        config = read()
        ignored = server.reload(config)
    except ConfigError as error:
        _LOGGER.error("settings not reloaded", extra={"reason": str(error)})  # noqa: TRY400 - the operator's fault, and the reason says all
    else:
        set_level(config.log_level)
        _LOGGER.info("settings reloaded", extra={"need_restart": ignored})
    notifier.ready()


async def _opened_endpoint(server: Operated, address: str) -> Endpoint:
    stuck: Callable[[], Sequence[str]] = server.stuck
    collector = DaemonCollector(status=server.status, counters=lambda: server.counters, stuck=stuck)
    endpoint = Endpoint(
        address, {"/metrics": metrics_route(collector), "/healthz": health_route(stuck)}
    )
    await endpoint.open()
    _LOGGER.info("metrics served", extra={"metrics_address": address, "port": endpoint.port})
    return endpoint


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
