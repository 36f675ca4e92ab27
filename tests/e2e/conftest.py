"""Real daemons and trainers for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stormd.child_daemon import ChildDaemon


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=512MiB", "--cache-bytes=8MiB", "--device=cpu"]) as daemon:
        yield daemon
