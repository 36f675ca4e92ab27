"""The daemon's log: one line an event, for people or for machines.

An event is a short fixed message and named fields (`extra=`), so that a line can be counted and
searched without parsing prose, and the text and the JSON form carry the same.

A terminal that stands still, or a pipe that nobody reads, takes no byte for as long as it likes,
and whoever writes to it waits. That may be no thread that anything else depends on: a queue takes
what is written, and a thread empties it. What has no room is dropped and counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, Self, TextIO

__all__ = [
    "JsonFormatter",
    "LogQueue",
    "TextFormatter",
    "dropped_lines",
    "logging_process",
    "set_level",
    "setup_logging",
]

_LOGGER: Final = logging.getLogger(__name__)

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

    def __exit__(self, *_: object) -> None:
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
            with contextlib.suppress(OSError):
                select.select([], [descriptor], [])
        except OSError:
            return False
    return True


LogStream = TextIO | LogQueue

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`2026-11-22 07:31:02+0100 info    stormd.server: ready address=ipc:///run/x.sock`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one event, with its traceback below where it has one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
        pairs = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname.lower():7} {record.name}: {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one event; its traceback, where it has one, is a field."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup_logging(log_format: str, level: str, stream: LogStream) -> None:
    """Send the daemon's events to `stream`; replaces any before."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger("stormd")
    logger.handlers[:] = [handler]
    logger.propagate = False
    set_level(level)


@contextlib.contextmanager
def logging_process(log_format: str, level: str, descriptor: int) -> Iterator[LogQueue]:
    """Have all that this process says go to `descriptor` by way of a queue, while the block runs.

    So nothing but the queue's thread ever waits for who reads it: events, also those of libraries,
    warnings, and the errors of threads and destructors.
    """
    with LogQueue(descriptor) as queue:
        setup_logging(log_format, level, queue)
        (handler,) = logging.getLogger("stormd").handlers
        queue.notice = lambda count: _line_of_loss(handler, count)
        logging.getLogger("py.warnings").handlers[:] = [handler]
        logging.captureWarnings(capture=True)
        before = logging.lastResort, threading.excepthook, sys.unraisablehook
        logging.lastResort = handler
        threading.excepthook = _log_thread_error
        sys.unraisablehook = _log_unraisable
        try:
            yield queue
        finally:
            logging.lastResort, threading.excepthook, sys.unraisablehook = before
            logging.captureWarnings(capture=False)


def set_level(level: str) -> None:
    """Log events of `level` and above from now on."""
    logging.getLogger("stormd").setLevel(level.upper())


def dropped_lines() -> int:
    """Return how many lines of the log had no room in its queue, or no reader."""
    streams = (getattr(one, "stream", None) for one in logging.getLogger("stormd").handlers)
    return sum(stream.dropped for stream in streams if isinstance(stream, LogQueue))


def _line_of_loss(handler: logging.Handler, count: int) -> str:
    fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
    record = logging.makeLogRecord({**fields, "msg": "log lines were dropped", "count": count})
    return f"{handler.format(record)}\n"


def _log_thread_error(error: threading.ExceptHookArgs) -> None:
    name = "a thread" if error.thread is None else f"thread {error.thread.name}"
    _LOGGER.error("%s has ended by an error", name, exc_info=error.exc_value)


def _log_unraisable(error: sys.UnraisableHookArgs) -> None:
    about = error.err_msg or "Exception ignored in"
    _LOGGER.error("%s %r", about, error.object, exc_info=error.exc_value)
