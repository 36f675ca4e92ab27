"""The daemon's log: one line an event, for people or for machines.

An event is a short fixed message and named fields (`extra=`), so that a line can be counted and
searched without parsing prose, and the text and the JSON form carry the same.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from stormd.monitoring.log_queue import LogQueue

__all__ = [
    "JsonFormatter",
    "TextFormatter",
    "dropped_lines",
    "logging_process",
    "set_level",
    "setup_logging",
]

_LOGGER: Final = logging.getLogger(__name__)

LogStream = TextIO | LogQueue

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return what `extra=` added to the record."""
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
