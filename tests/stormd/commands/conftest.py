"""A real daemon for the commands that ask one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from storm_bench.child_daemon import ChildDaemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=8MiB", "--cache-bytes=0", "--device=cpu"]) as daemon:
        yield daemon
