"""Takes the daemon's log off whoever writes it: a bounded queue, and a thread that empties it.

A terminal that stands still, or a pipe that nobody reads, takes no byte for as long as it likes,
and whoever writes to it waits. That may be no thread that anything else depends on. So what has no
room is dropped and counted, and once there is room again the count is written.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

__all__ = ["LogQueue"]

QUEUE_BYTES: Final = 1 << 20
"""Of text that waits to be written: some 8,000 lines."""

CLOSE_SECONDS: Final = 1.0
"""How long the end waits for what is in the queue."""


class LogQueue:
    """Writes text to `descriptor`, which is not closed, in a thread of its own, in order.

    `write`, `flush` and `isatty` are those of a stream, and never wait. `dropped` counts what was
    written in vain; `notice(count)` returns the text that tells of it, once there is room again.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        limit_bytes: int = QUEUE_BYTES,
        notice: Callable[[int], str] = lambda count: f"{count} log lines were dropped\n",
    ) -> None:
        self.notice = notice
        self.dropped = 0
        self._descriptor = descriptor
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()  # protects `dropped` and all below
        self._texts: deque[bytes] = deque()
        self._waiting_bytes = 0  # with the text that is being written
        self._told = 0  # of those that were dropped
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stormd-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Have a text written, all of it or nothing."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._closed or self._waiting_bytes + len(data) > self._limit_bytes:
                self.dropped += 1
            else:
                self._texts.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Do nothing: what was written is on its way."""

    def isatty(self) -> bool:
        """Tell whether a person sees it."""
        return os.isatty(self._descriptor)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Take nothing more, and wait until all is written, at most so long. Twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while (data := self._next()) is not None:
            is_written = _write_all(self._descriptor, data)
            with self._changed:
                self.dropped += not is_written
                self._waiting_bytes -= len(data)

    def _next(self) -> bytes | None:
        """Wait for a text and return it, or else what tells of those that were dropped.

        None once the queue is closed and all is said. That the telling fails is not told.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._texts or self._closed or self.dropped > self._told)
            if self._texts:
                return self._texts.popleft()
            lost, self._told = self.dropped - self._told, self.dropped
        if lost:
            _write_all(self._descriptor, self.notice(lost).encode())
            return b""
        return None


def _write_all(descriptor: int, data: bytes) -> bool:
    """Write it, however long that takes; False where it cannot be: the reader is gone, say."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody else who has it open has made it so
            with suppress(OSError):
                select.select([], [descriptor], [])
        except OSError:
            return False
    return True
