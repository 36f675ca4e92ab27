"""Daemons in processes of their own whose lane is one of the tests'."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from storm_bench.child_daemon import ChildDaemon
from support.waiting import wait_until

TESTS = Path(__file__).parents[1]


@contextmanager
def daemon_with_lane(folder: str, flags: Sequence[str]) -> Iterator[ChildDaemon]:
    """Start a daemon that first runs the sitecustomize of a folder beside this file.

    It outlives a process that served: `end` ends that one, and another goes on.
    """
    path = [str(TESTS / "support" / folder), str(TESTS), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        child = ChildDaemon(flags=list(flags))
        child.__enter__()
    yield child
    child.close()


def end(pid: int, number: int) -> None:
    """Send a serving process a signal that ends it, and wait until it is gone."""
    os.kill(pid, number)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 60.0)
