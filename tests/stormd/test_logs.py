"""Log lines: the same event for people and for programs."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from stormd.logs import setup_logging


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger = logging.getLogger("stormd")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


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


def test_the_level_filters() -> None:
    assert "quiet" not in _logged("text")
    assert "quiet" in _logged("text", "debug")


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


def test_setting_up_again_replaces() -> None:
    first = io.StringIO()
    setup_logging("text", "info", first)
    _logged("text")
    assert first.getvalue() == ""
