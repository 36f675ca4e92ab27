"""Ranks of one job follow one plan, though each has measured other costs, and bits are the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client.eager import ranks as shell
from storm_client.eager.ranks import MOST_LONELY, Ranks, _within
from storm_client.eager.signature import SAVED, Kind, RecordedValue
from storm_client.planner.search import OFFLOAD_ALONE
from storm_client.planner.slowest import Agreed, Figures
from support import agreeing_ranks
from support.daemon_process import DaemonProcess

TESTS = str(Path(agreeing_ranks.__file__).parents[1])


def tcp() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def run(
    case: str,
    daemon: DaemonProcess | ChildDaemon,
    *,
    store: str = "",
    world: int = 2,
    gpus: str = "",
) -> list[Any]:
    """Return what each rank has found; None for one that was killed."""
    store = store or tcp()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(agreeing_ranks.__file__)),
                *(str(rank), str(world), store, daemon.address, case),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": gpus,
                "PYTHONPATH": os.pathsep.join([TESTS, os.environ["PYTHONPATH"]]),
            },
        )
        for rank in range(world)
    ]
    found: list[Any] = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=240)
            if case == f"killed-{rank}":
                assert process.returncode == -9
                found.append(None)
                continue
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
            assert found[-1]["same"]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_other_costs_follow_one_plan_from_the_same_step_on(
    world: int, daemon: DaemonProcess
) -> None:
    first, *others = run("alike", daemon, world=world)
    assert all(other["followed"] == first["followed"] for other in others)
    assert first["followed"][-1]
    assert not first["messages"]


def test_ranks_compare_plans_by_the_slowest_of_them(daemon: DaemonProcess) -> None:
    """The plan that is best for all is not that which the first rank would follow."""
    first, second = run("compared", daemon)
    assert first["followed"] == second["followed"]
    assert len(set(first["followed"])) > 2, "several plans were followed"
    assert first["compared"] == second["compared"]
    assert first["compared"].startswith(f"{OFFLOAD_ALONE.name}, settled")


def test_ranks_that_shard_their_model_follow_one_plan(daemon: DaemonProcess) -> None:
    first, second = run("sharded", daemon)
    assert first["followed"] == second["followed"]
    assert first["followed"][-1]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["alike", "sharded"])
def test_ranks_on_gpus_compare_plans_together(case: str) -> None:
    """By nccl, with DDP and FSDP2: threads run ahead of devices, and costs are what they are."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, {torch.cuda.device_count()} here")
    flags = ["--pool-bytes=16GiB", "--device=cuda"]
    with ChildDaemon(flags=flags, start_seconds=120.0) as daemon:
        first, second = run(case, daemon, gpus="0,1")
    assert first["followed"] == second["followed"]
    assert first["offloaded_bytes"] > 0
    assert first["compared"] == second["compared"] != ""
    assert len(set(first["followed"])) > 2, "several plans were followed"
    assert not first["messages"]


def test_ranks_find_each_other_by_a_file(daemon: DaemonProcess, tmp_path: Path) -> None:
    first, second = run("alike", daemon, store=f"file://{tmp_path / 'store'}")
    assert first["followed"] == second["followed"]
    assert first["followed"][-1]


def test_stages_of_a_pipeline_plan_with_those_that_run_the_same(daemon: DaemonProcess) -> None:
    first, second, third = run("stages", daemon, world=3)
    assert first["followed"] == second["followed"]
    assert first["followed"][-1]
    assert third["followed"][-1] not in ("", first["followed"][-1])
    assert not [message for one in (first, second, third) for message in one["messages"]]


def test_a_rank_that_offloads_later_takes_over_the_others_plan(daemon: DaemonProcess) -> None:
    found = run("late", daemon, world=3)
    last = {one["followed"][-1] for one in found}
    assert len(last) == 1
    assert last != {""}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_outlives_another_that_is_killed(dead: int, daemon: DaemonProcess) -> None:
    """Also where that had the job's store."""
    found = run(f"killed-{dead}", daemon)
    left = found[1 - dead]
    assert left["followed"][-1], "it has a plan of its own"
    (message,) = left["messages"]
    assert "plans for itself" in message


def test_one_rank_shares_nothing() -> None:
    kind = kind_of(8)
    ranks = Ranks((), ())
    ranks.ended(kind)
    assert not ranks.shares(kind)


def test_what_does_not_return_is_not_waited_for() -> None:
    ends = threading.Event()
    try:
        with pytest.raises(TimeoutError, match="no answer"):
            _within(0.01, ends.wait)
    finally:
        ends.set()
    with pytest.raises(KeyError):
        _within(5.0, lambda: {}["nothing"])
    assert _within(5.0, lambda: "something") == "something"


def test_a_rank_with_batches_of_its_own_soon_asks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures that come later are planned at once."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(shell, "_are_several", lambda: True)
    monkeypatch.setattr(shell, "_job_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    ranks = Ranks((), ())
    for length in range(1, 6):
        kind = kind_of(length)
        ranks.ended(kind)
        assert ranks.shares(kind) is (length <= MOST_LONELY)
        if not ranks.shares(kind):
            continue
        store.set(f"storm/{ranks._number}/{length - 1}/first/1", "another")
        ranks.agree(NoPlanner(), [])
        assert not ranks.shares(kind)
        assert kind.is_outdated


class NoPlanner:
    """Nothing is planned together."""

    def figures(self, kind: Kind, steps: object) -> Figures:
        raise NotImplementedError

    def decide(self, kind: Kind, slowest: Figures, followed: object) -> Agreed:
        raise NotImplementedError

    def follow_agreed(self, kind: Kind, agreed: Agreed, *, leads: bool) -> None:
        raise NotImplementedError


def kind_of(length: int) -> Kind:
    value = RecordedValue(0, length, torch.uint8, torch.Size([length]))
    return Kind(((SAVED, 0, None, ()),), [value])
