"""Log lines: the same event for people and for programs."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from stormd.monitoring.logs import dropped_lines, logging_process, setup_logging


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger, warning = logging.getLogger("stormd"), logging.getLogger("py.warnings")
    before = (logger.handlers[:], logger.level, logger.propagate, warning.handlers[:])
    yield
    logger.handlers[:], logger.level, logger.propagate, warning.handlers[:] = before


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe, in which there is room for a page."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield reading, writing
    for end in (reading, writing):
        os.close(end)


def _logged(log_format: str, level: str = "info") -> str:
    stream = io.StringIO()
    setup_logging(log_format, level, stream)
    logger = logging.getLogger("stormd.test")
    logger.debug("quiet")
    logger.info("ready", extra={"address": "ipc:///x", "pool_bytes": 7})
    return stream.getvalue()


def test_text_lines_carry_event_and_fields() -> None:
    line = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} info    stormd.test: ready "
    assert re.fullmatch(line + r"address=ipc:///x pool_bytes=7\n", _logged("text"))


def test_json_lines_carry_the_same() -> None:
    line = json.loads(_logged("json"))
    assert line["event"] == "ready"
    assert line["level"] == "info"
    assert line["address"] == "ipc:///x"
    assert line["pool_bytes"] == 7
    assert line["time"].endswith("+00:00")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_exceptions_bring_their_traceback(log_format: str) -> None:
    stream = io.StringIO()
    setup_logging(log_format, "info", stream)
    try:
        int("seven")
    except ValueError:
        logging.getLogger("stormd.test").exception("broken")
    assert "ValueError: invalid literal" in stream.getvalue()
    if log_format == "json":
        assert stream.getvalue().count("\n") == 1


SPEAKING = """
import logging, threading, warnings
from stormd.monitoring.logs import logging_process

class Broken:
    def __del__(self):
        raise ValueError("in a destructor")

with logging_process("json", "info", 2):
    logging.getLogger("stormd.x").info("ours")
    logging.getLogger("asyncio").error("a library's")
    logging.getLogger("asyncio").info("nothing that matters")
    warnings.warn("beware")
    thread = threading.Thread(target=lambda: 1 / 0, name="t")
    thread.start()
    thread.join()
    Broken()
assert threading.excepthook is threading.__excepthook__
"""


def test_all_that_a_process_says_goes_the_same_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAKING], stderr=subprocess.PIPE, text=True, timeout=300, check=True
    )
    ours, theirs, warning, thread, destructor = map(json.loads, done.stderr.splitlines())
    assert (ours["event"], theirs["event"]) == ("ours", "a library's")
    assert "UserWarning: beware" in warning["event"]
    assert thread["event"] == "thread t has ended by an error"
    assert "ZeroDivisionError" in thread["traceback"]
    assert "in a destructor" in destructor["traceback"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_had_no_room_is_counted_and_told_of(pipe: tuple[int, int], log_format: str) -> None:
    reading, writing = pipe
    with logging_process(log_format, "info", writing):
        log = logging.getLogger("stormd.x")
        while not dropped_lines():
            log.info("x" * 60_000)
        log.info("x" * 60_000)
        assert dropped_lines() == 2
        found = b""
        while b"log lines were dropped" not in found:
            found += os.read(reading, 1 << 16)
        while not found.endswith(b"\n"):
            found += os.read(reading, 1 << 16)
        last = found.decode().splitlines()[-1]
        assert "count=2" in last if log_format == "text" else json.loads(last)["count"] == 2
        assert dropped_lines() == 2
