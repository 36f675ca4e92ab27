"""A daemon in a child process."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from storm_bench.child_daemon import ChildDaemon

from stormd.errors import ChildFailed

FLAGS = ["--pool-bytes=8MiB", "--cache-bytes=0", "--device=cpu"]


@pytest.mark.parametrize("has_died", [False, True])
def test_it_answers_inside_and_is_gone_outside(has_died: bool) -> None:
    with ChildDaemon(flags=FLAGS) as daemon:
        assert daemon.status()["pid"] == daemon.pid
        pid, directory = daemon.pid, Path(daemon.address.removeprefix("ipc://")).parent
        if has_died:
            os.kill(pid, 9)
    assert not psutil.pid_exists(pid)
    assert not directory.exists()
    daemon.close()


def test_a_failed_start_tells_the_daemons_words() -> None:
    with (
        pytest.raises(ChildFailed, match="pool_bytes is 7 B"),
        ChildDaemon(flags=["--pool-bytes=7"]),
    ):
        pass
