"""A daemon for runs that need none of their own, and runs that leave nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from storm_bench.child_daemon import ChildDaemon
from support.fake_mps import FakeMps
from support.supervised import Recorder, Run, start_run


@pytest.fixture(scope="package")
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=8MiB", "--cache-bytes=0", "--device=cpu"]) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def signals_are_heeded() -> Iterator[None]:
    """As in a terminal: tests in the background inherit that some are ignored, and pass it on."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGQUIT: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start(place: Path) -> Iterator[Callable[..., Run]]:
    """Start runs; when the test is over, however it went, nothing may be left of them."""
    runs: list[Run] = []

    def begin(*arguments: str, **options: object) -> Run:
        runs.append(start_run(place, *arguments, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
        run.end()
        run.assert_nothing_is_left()


@pytest.fixture
def start_beside(start: Callable[..., Run], daemon: ChildDaemon) -> Callable[..., Run]:
    """Start runs that find a daemon."""
    return partial(start, variables={"STORMD_ADDRESS": daemon.address})


@pytest.fixture
def fake_mps(place: Path) -> FakeMps:
    return FakeMps(place)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "record")
