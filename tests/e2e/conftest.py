"""Real daemons and trainers for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from storm_bench.child_daemon import ChildDaemon
from support.patience import patient_clients
from support.trainers import Trainers


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """Give the daemon time: the machine may give it none."""
    with patient_clients():
        yield


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=128MiB", "--cache-bytes=8MiB", "--device=cpu"]) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def nursery() -> Iterator[Trainers]:
    """The process that trainers are forked from: it takes seconds to start."""
    with Trainers() as trainers:
        yield trainers


@pytest.fixture
def trainers(nursery: Trainers) -> Iterator[Trainers]:
    yield nursery
    nursery.kill_all()
