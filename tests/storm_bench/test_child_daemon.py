"""A daemon in a child process."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from storm_bench.child_daemon import ChildDaemon

from stormd.errors import ChildFailed

FLAGS = ["--pool-bytes=8MiB", "--cache-bytes=0", "--device=cpu"]


def test_answers_inside_and_is_gone_outside() -> None:
    with ChildDaemon(flags=FLAGS) as daemon:
        assert daemon.status()["pid"] == daemon.pid
        pid, socket = daemon.pid, Path(daemon.address.removeprefix("ipc://"))
        assert socket.exists()
    assert not psutil.pid_exists(pid)
    assert not socket.parent.exists()
    daemon.close()


def test_a_failed_start_tells_the_daemons_words() -> None:
    with (
        pytest.raises(ChildFailed, match="pool_bytes is 7 B"),
        ChildDaemon(flags=["--pool-bytes=7"]),
    ):
        pass


def test_a_daemon_that_died_inside_is_cleaned_up() -> None:
    with ChildDaemon(flags=FLAGS) as daemon:
        directory = Path(daemon.address.removeprefix("ipc://")).parent
        os.kill(daemon.pid, 9)
    assert not directory.exists()
