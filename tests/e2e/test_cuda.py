"""Training processes on one GPU: exact together, and a death makes nobody hang or be wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from storm_bench.child_daemon import ChildDaemon
from support.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.timeout(300),
]

TRAINER = Path(__file__).parents[1] / "support" / "cuda_trainer.py"
EXPANDING = TRAINER.with_name("expandable_trainer.py")
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
NOTICED_SECONDS = 60.0
KILLS = 5
MANY = 100_000
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def daemon_process(*flags: str) -> ChildDaemon:
    return ChildDaemon(flags=["--pool-bytes=2GiB", "--device=cuda", *flags])


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with daemon_process() as daemon:
        yield daemon


@contextmanager
def trainer(
    address: str, steps: int, program: Path = TRAINER, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(program), address, str(steps)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    return [process.stdout.readline().strip() for _ in range(count)]


def assert_empty(daemon: ChildDaemon) -> None:
    wait_until(lambda: not daemon.status()["sessions"], NOTICED_SECONDS, daemon.status)
    pool = daemon.status()["pool"]
    assert pool["used_bytes"] == pool["promised_bytes"] == 0


def test_two_trainers_share_a_daemon_and_stay_exact(daemon: ChildDaemon) -> None:
    with trainer(daemon.address, 20) as one, trainer(daemon.address, 20) as other:
        for process in (one, other):
            assert lines(process, 22) == ["ready", *["same"] * 20, "done"]
    assert_empty(daemon)


@pytest.mark.parametrize(
    "environment",
    [
        EXPANDABLE,
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        {CONNECTIONS: "1"},
    ],
    ids=str,
)
def test_settings_that_forbid_exports_or_join_streams(
    daemon: ChildDaemon, environment: dict[str, str]
) -> None:
    with trainer(daemon.address, 5, **environment) as process:
        assert lines(process, 7) == ["ready", *["same"] * 5, "done"]


@pytest.mark.alone
def test_expandable_segments_are_used_in_place_and_given_back(daemon: ChildDaemon) -> None:
    with trainer(daemon.address, 12, EXPANDING, **EXPANDABLE) as process:
        said = lines(process, 15)
    assert (said[0], said[-1]) == ("ready", "done"), said
    steps = [line.split() for line in said[1:13]]
    assert [same for same, _ in steps] == ["same"] * 12
    assert all(int(found) > 0 for _, found in (*steps[3:6], *steps[9:])), said
    assert int(said[13].removeprefix("held ")) < 64 << 20, said


@pytest.mark.alone
def test_a_killed_trainers_expandable_segments_are_freed(daemon: ChildDaemon) -> None:
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    with trainer(daemon.address, MANY, EXPANDING, **EXPANDABLE) as victim:
        assert [line.split()[0] for line in lines(victim, 5)] == ["ready", *["same"] * 4]
        victim.kill()
    assert_empty(daemon)
    wait_until(lambda: torch.cuda.mem_get_info()[0] > free - (64 << 20), NOTICED_SECONDS)


def test_trainers_share_a_daemon_that_has_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of it that waited for one of them would hold the others up."""
    monkeypatch.setenv(CONNECTIONS, "1")
    with (
        daemon_process() as daemon,
        trainer(daemon.address, 20, **{CONNECTIONS: "8"}) as one,
        trainer(daemon.address, 20, **{CONNECTIONS: "8"}) as other,
    ):
        for process in (one, other):
            assert lines(process, 22) == ["ready", *["same"] * 20, "done"]


def test_a_staging_area_smaller_than_one_tensor() -> None:
    with (
        daemon_process("--staging-bytes-cuda=1MiB", "--part-bytes-cuda=256KiB") as daemon,
        trainer(daemon.address, 5) as process,
    ):
        assert lines(process, 7) == ["ready", *["same"] * 5, "done"]


def test_a_pool_too_small_leaves_tensors_with_the_trainer() -> None:
    with (
        daemon_process("--pool-bytes=16MiB") as daemon,
        trainer(daemon.address, 5) as process,
    ):
        assert lines(process, 7) == ["ready", *["same"] * 5, "done"]


def test_a_killed_trainer_costs_its_neighbour_nothing(daemon: ChildDaemon) -> None:
    with trainer(daemon.address, MANY) as survivor:
        assert lines(survivor, 2) == ["ready", "same"]
        for attempt in range(KILLS):
            with trainer(daemon.address, MANY) as victim:
                assert lines(victim, 3) == ["ready", "same", "same"]
                time.sleep(random.Random(attempt).random() / 20)  # any moment of a step
                victim.kill()
                # both own a session on the host and one on the GPU
                wait_until(
                    lambda: len(daemon.status()["sessions"]) == 2, NOTICED_SECONDS, daemon.status
                )
            assert set(lines(survivor, 5)) == {"same"}
    wait_until(lambda: not daemon.status()["sessions"], NOTICED_SECONDS, daemon.status)
    assert_empty(daemon)


@pytest.mark.parametrize("attempt", range(KILLS))
def test_the_daemons_death_is_an_error_and_never_a_wrong_gradient(attempt: int) -> None:
    with daemon_process() as daemon, trainer(daemon.address, MANY) as process:
        assert lines(process, 3) == ["ready", "same", "same"]
        time.sleep(random.Random(attempt).random() / 20)  # any moment of a step
        os.kill(daemon.pid, signal.SIGKILL)
        last = "same"
        while last == "same":
            last = lines(process, 1)[0]
        assert last in ("DaemonLost", "ActivationLost")
        assert process.wait(NOTICED_SECONDS) == 0
