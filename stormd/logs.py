"""The daemon's log: one line an event, for people or for machines.

An event is a short fixed message and named fields (`extra=`), so that a line can be counted and
searched without parsing prose, and the text and the JSON form carry the same.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

__all__ = ["JsonFormatter", "TextFormatter", "set_level", "setup_logging"]

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


def setup_logging(log_format: str, level: str, stream: TextIO | None = None) -> None:
    """Send the daemon's events to `stream`, standard error where None; replaces any before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger("stormd")
    logger.handlers[:] = [handler]
    logger.propagate = False
    set_level(level)


def set_level(level: str) -> None:
    """Log events of `level` and above from now on."""
    logging.getLogger("stormd").setLevel(level.upper())
