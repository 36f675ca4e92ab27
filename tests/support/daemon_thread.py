"""A daemon in a thread of the test's own process, so that a test can look inside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import uvloop
from support.waiting import wait_until

from stormd.config import Config
from stormd.errors import StormdError
from stormd.server import Server

Answer = TypeVar("Answer")

WAIT_SECONDS = 60.0
"""For the loop and its end, on a machine as busy as may be."""

EMPTY_SECONDS = 60.0
"""A session that never got its lifeline ends after 5.5 s, without any load."""

uvloop.new_event_loop().close()  # the first loop opens a pipe that libuv keeps: no leak of a test


class DaemonThread:
    """Serves from construction until `stop`; both wait for the daemon."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.address = config.address
        self.server = Server(config)
        self._ready = threading.Event()
        self.error: BaseException | None = None
        """Why it could not be opened, or serve on."""
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="test-daemon")
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            self._thread.join()
            raise self.error

    def on_loop(self, call: Callable[[], Answer]) -> Answer:
        """Return what the call returns on the daemon's loop."""

        async def made() -> Answer:
            return call()

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result(WAIT_SECONDS)

    def status(self) -> dict[str, Any]:
        return self.on_loop(self.server.status)

    def check(self) -> None:
        """Assert the ledger's and the arena's invariants."""
        self.on_loop(self.server._ledger.assert_invariants)

    def wait_until_empty(self) -> None:
        """Wait until no session is left, then assert that nothing of any is."""
        wait_until(lambda: not self.status()["sessions"], EMPTY_SECONDS, self.status)
        self.check()
        pool = self.status()["pool"]
        assert (pool["used_bytes"], pool["promised_bytes"]) == (0, 0)
        assert pool["largest_free_bytes"] == pool["committed_bytes"]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the daemon in order. Twice is fine."""
        with suppress(RuntimeError):  # the loop is closed: it has ended by itself
            self.server.stop()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the daemon does not end"

    def _run(self) -> None:
        uvloop.run(self._serve())  # as `stormd serve` does

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await self.server.open()
        except BaseException as error:  # noqa: BLE001 - raised again by the constructor
            self.error = error
            return
        finally:
            self._ready.set()
        try:
            await self.server.serve()
        except StormdError as error:
            self.error = error
        await self.server.close()
