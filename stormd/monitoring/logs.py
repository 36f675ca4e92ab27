"""The daemon's log: one line per event, for people or for machines.

An event is a short fixed message and named fields (`extra=`), so that lines can be counted and
searched without parsing prose. The text and the JSON form carry the same fields.

A stopped terminal, or a pipe that nobody reads, may block its writer for any time. No thread that
others depend on may block there. So log text is put into a queue, and one thread writes it. Text
for which the queue has no space is dropped and counted.
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
"""The most bytes of text that wait to be written: some 8,000 lines."""

CLOSE_SECONDS: Final = 1.0
"""How long `close` waits until the queue is written."""


class LogQueue:
    """Writes text to `descriptor` in order, in a thread of its own; does not close `descriptor`.

    `write`, `flush` and `isatty` are those of a stream, and never wait. `dropped` counts texts that
    were lost. `notice(count)` returns the text that reports them, once the queue is empty again.
    """

    def __init__(self, descriptor: int) -> None:
        self.notice: Callable[[int], str] = lambda count: f"{count} log lines were dropped\n"
        self.dropped = 0
        self._descriptor = descriptor
        self._changed = threading.Condition()  # protects `dropped` and all below
        self._texts: deque[bytes] = deque()
        self._waiting_bytes = 0  # including the text that is being written
        self._told = 0  # dropped texts that were reported
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stormd-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a text to be written, all of it, or drop it."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._closed or self._waiting_bytes + len(data) > QUEUE_BYTES:
                self.dropped += 1
            else:
                self._texts.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes all queued text."""

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Accept no more text, and wait at most `seconds` until all is written. Twice is fine."""
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
        """Wait for a text and return it; with no text, report dropped ones and return b"".

        Returns None once the queue is closed and nothing is left to write or report. A failure to
        write the report is not reported.
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
    """Write all data, however long that takes; return False if it fails, as without a reader."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has made it non-blocking
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
        """Return the line of one event, with its traceback below if it has one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
        pairs = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname.lower():7} {record.name}: {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC, ISO 8601), level, logger, event, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of one event; its traceback, if it has one, is a field."""
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
    """Send the daemon's events to `stream`, in place of any earlier stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger("stormd")
    logger.handlers[:] = [handler]
    logger.propagate = False
    set_level(level)


@contextlib.contextmanager
def logging_process(log_format: str, level: str, descriptor: int) -> Iterator[LogQueue]:
    """Write all that this process logs to `descriptor` through a queue, while the block runs.

    That is events, also those of libraries, warnings, and the errors of threads and destructors. So
    only the queue's thread ever waits for the reader.
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
    """Return how many lines of the log were lost: the queue was full, or nobody read them."""
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
