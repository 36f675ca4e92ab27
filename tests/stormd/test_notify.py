"""The service manager's datagrams, read back from a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from stormd.config import Config
from stormd.errors import ConfigError
from stormd.notify import Notifier, feed_watchdog, watchdog_seconds
from stormd.running import StartReport, reload_settings

SECONDS = 60.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """A service manager's end of the protocol."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(SECONDS)
        yield end


def notifier_to(manager: socket.socket) -> Notifier:
    return Notifier.from_environment({"NOTIFY_SOCKET": manager.getsockname()})


def fields(manager: socket.socket) -> dict[str, str]:
    lines = manager.recv(4096).decode().split("\n")
    return dict(line.split("=", 1) for line in lines)


def test_says_each_state(manager: socket.socket) -> None:
    with notifier_to(manager) as notifier:
        notifier.starting("pinning 1 of 4 GiB", more_seconds=30)
        notifier.ready()
        notifier.reloading()
        notifier.watchdog()
        notifier.stopping()
    assert fields(manager) == {
        "STATUS": "pinning 1 of 4 GiB",
        "EXTEND_TIMEOUT_USEC": "30000000",
    }
    assert fields(manager)["READY"] == "1"
    reloading = fields(manager)
    assert reloading["RELOADING"] == "1"
    assert int(reloading["MONOTONIC_USEC"]) > 0
    assert fields(manager) == {"WATCHDOG": "1"}
    assert fields(manager)["STOPPING"] == "1"


def test_a_reload_takes_settings_and_level_and_is_told(manager: socket.socket) -> None:
    server, level = (
        Mock(reload=Mock(return_value=["pool_bytes"])),
        logging.getLogger("stormd").level,
    )
    read = Config(log_level="error")
    try:
        with notifier_to(manager) as notifier:
            reload_settings(server, notifier, lambda: read)
        assert logging.getLogger("stormd").level == logging.ERROR
    finally:
        logging.getLogger("stormd").setLevel(level)
    server.reload.assert_called_once_with(read)
    assert [next(iter(fields(manager))) for _ in range(2)] == ["RELOADING", "READY"]


def test_the_start_is_reported_once_a_second(manager: socket.socket) -> None:
    now = [100.0]
    with notifier_to(manager) as notifier:
        report = StartReport(notifier, clock=lambda: now[0])
        report(0, 4 << 30)
        report(1 << 30, 4 << 30)
        now[0] += 1.5
        report(2 << 30, 4 << 30)
    said = [fields(manager)["STATUS"] for _ in range(2)]
    assert said == [f"pinning the pool, {done} of 4.0 GiB" for done in ("0 B", "2.0 GiB")]


def test_a_manager_that_is_gone_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("stormd"), "propagate", True)
    with Notifier(str(tmp_path / "nobody")) as notifier:
        notifier.ready()
    assert "service manager not told" in caplog.text


def test_a_full_queue_does_not_block(manager: socket.socket) -> None:
    with notifier_to(manager) as notifier:
        for _ in range(2000):  # far above the kernel's max_dgram_qlen
            notifier.watchdog()


def test_watchdog_interval() -> None:
    given = {"WATCHDOG_USEC": "30000000"}
    for environ, seconds in (
        ({}, 0.0),
        (given, 30.0),
        (given | {"WATCHDOG_PID": "7"}, 30.0),
        (given | {"WATCHDOG_PID": "8"}, 0.0),
    ):
        assert watchdog_seconds(environ, pid=7) == seconds


def test_variables_that_make_no_sense_are_named() -> None:
    with pytest.raises(ConfigError, match=r"NOTIFY_SOCKET is 'run/notify'.*unset"):
        Notifier("run/notify")
    for text in ("0", "-1", "soon"):
        with pytest.raises(ConfigError, match="WATCHDOG_USEC"):
            watchdog_seconds({"WATCHDOG_USEC": text})


async def test_the_watchdog_is_fed_only_while_nothing_is_stuck(manager: socket.socket) -> None:
    asked: list[int] = []
    answers = iter([[], ["cpu-0 is stuck"], []])
    done = asyncio.Event()

    def stuck() -> list[str]:
        asked.append(1)
        answer = next(answers, None)
        if answer is None:
            done.set()
            return ["end of the test"]
        return answer

    with notifier_to(manager) as notifier:
        feeding = asyncio.create_task(feed_watchdog(notifier, 0.002, stuck))
        await asyncio.wait_for(done.wait(), SECONDS)
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
    assert [fields(manager), fields(manager)] == [{"WATCHDOG": "1"}] * 2
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(1)


def test_what_was_kept_is_found_by_the_process_that_it_is_for() -> None:
    """In a child, whose descriptors from 3 on are those that a manager puts there."""
    script = (
        "import os; from stormd.notify import take_kept; environ = dict(os.environ);"
        "environ['LISTEN_PID'] = str(os.getpid()) if environ['LISTEN_PID'] == 'own' else '1';"
        "kept = take_kept(environ); print(sorted(kept.items()), [os.get_inheritable(one) for one in"
        " kept.values()], 'LISTEN_FDS' in environ)"
    )
    code = (
        "import os, sys; null = os.dup2(os.open('/dev/null', os.O_RDONLY), 9);"
        "[os.dup2(null, at) for at in (3, 4, 5)];"
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    )
    given = {"LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:a"}
    for pid, expected in (
        ("own", "[('a', 5), ('b', 4)] [False, False] False"),
        ("1", "[] [] False"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, script],
            env=os.environ | given | {"LISTEN_PID": pid},
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
        assert done.stdout.strip() == expected
