"""Ranks of one job follow one plan, though each has measured other costs, and bits are the same."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import storm_client as storm
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # older PyTorch has the group "fake" there
from storm_bench.child_daemon import ChildDaemon
from storm_client.job_store import within
from storm_client.planner.search import OFFLOAD_ALONE
from support import agreeing_ranks
from support.daemon_process import DaemonProcess
from support.rank_processes import rank_processes
from torch import nn


def tcp() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def run(
    cases: Sequence[str],
    daemon: DaemonProcess | ChildDaemon,
    *,
    store: str = "",
    world: int = 2,
    gpus: str = "",
) -> dict[str, list[Any]]:
    """Return what each rank has found, by case; None for one that was killed."""
    store = store or tcp()
    arguments = [[str(rank), str(world), store, daemon.address, *cases] for rank in range(world)]
    found: dict[str, list[Any]] = {case: [] for case in cases}
    with rank_processes(agreeing_ranks, arguments, gpus) as processes:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=400)
            is_killed = cases[-1] == f"killed-{rank}"
            assert process.returncode == (-9 if is_killed else 0), err
            lines = [line for line in out.splitlines() if line.startswith("{")]
            lines += ["null"] * is_killed
            for case, line in zip(cases, lines, strict=True):
                found[case].append(json.loads(line))
                assert line == "null" or found[case][-1]["same"], case
    return found


@pytest.fixture(scope="module")
def two(daemon: DaemonProcess) -> dict[str, list[Any]]:
    """What two ranks have found, case by case, which found each other by a socket.

    At the end the first one is killed, which had the job's store.
    """
    cases = ["alike", "again", "sharded", "flat", "tensor_parallel", "compared", "killed-0"]
    return run(cases, daemon)


@pytest.fixture(scope="module")
def three(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What three have, which found each other by a file."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    return run(["alike", "stages", "late"], daemon, store=f"file://{store}", world=3)


@pytest.mark.parametrize("ranks", ["two", pytest.param("three", marks=pytest.mark.slow)])
def test_ranks_with_other_costs_follow_one_plan_from_the_same_step_on(
    ranks: str, request: pytest.FixtureRequest
) -> None:
    first, *others = request.getfixturevalue(ranks)["alike"]
    assert all(other["followed"] == first["followed"] for other in others)
    assert first["followed"][-1]
    assert not first["messages"]


def test_ranks_compare_plans_by_the_slowest_of_them(two: dict[str, list[Any]]) -> None:
    """The plan that is best for all is not that which the first rank would follow.

    All compare plans anew when one of them has to share its link.
    """
    first, second = two["compared"]
    assert first["followed"] == second["followed"]
    assert len(set(first["followed"])) > 2, "several plans were followed"
    assert first["compared"] == second["compared"]
    assert first["compared"].startswith(f"{OFFLOAD_ALONE.name}, settled")
    for rank in (first, second):
        turns = [now for before, now in pairwise([False, *rank["settled"]]) if now != before]
        assert turns == [True, False, True]
    in_turn = first["in_turn"] or second["in_turn"]
    assert max(in_turn) > 1, "plans are followed in turn, without a decision between two of them"


def test_ranks_agree_again_in_another_process_group(two: dict[str, list[Any]]) -> None:
    """The first one's store is gone, so the plan made before would stay, or each had its own."""
    first, second = two["again"]
    assert first["followed"] == second["followed"]
    assert first["followed"][-1]
    assert not first["messages"]
    assert not second["messages"]


@pytest.mark.parametrize("case", ["sharded", "flat", "tensor_parallel"])
def test_ranks_that_shard_their_model_follow_one_plan(case: str, two: dict[str, list[Any]]) -> None:
    """Also where each runs other functions to find its parameters."""
    first, second = two[case]
    assert first["followed"] == second["followed"]
    assert first["followed"][-1]
    for rank in (first, second):
        assert rank["skipped"]["parameter"] > 0
        assert "subclass" not in rank["skipped"]


def test_of_what_is_distributed_the_bytes_of_a_rank_count(two: dict[str, list[Any]]) -> None:
    """Half of the parameters, where FSDP has all of them gathered."""
    for parts, whole in zip(two["tensor_parallel"], two["sharded"], strict=True):
        of_step = [one["skipped_bytes"] / len(one["followed"]) for one in (parts, whole)]
        assert of_step[0] < 0.6 * of_step[1]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["alike", "sharded"])
def test_ranks_on_gpus_compare_plans_together(case: str) -> None:
    """By nccl, with DDP and FSDP2: threads run ahead of devices, and costs are what they are."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, {torch.cuda.device_count()} here")
    flags = ["--pool-bytes=16GiB", "--device=cuda"]
    with ChildDaemon(flags=flags, start_seconds=120.0) as daemon:
        first, second = run([case], daemon, gpus="0,1")[case]
    assert first["followed"] == second["followed"]
    assert first["offloaded_bytes"] > 0
    # Later the leader may note that other work on the machine slows the chosen plan.
    assert first["first_settled"] == second["first_settled"] != ""
    assert len(set(first["followed"])) > 2, "several plans were followed"
    assert not first["messages"]


@pytest.mark.slow
def test_stages_of_a_pipeline_plan_with_those_that_run_the_same(
    three: dict[str, list[Any]],
) -> None:
    first, second, third = three["stages"]
    assert first["followed"] == second["followed"]
    assert first["followed"][-1]
    assert third["followed"][-1] not in ("", first["followed"][-1])
    assert not [message for one in (first, second, third) for message in one["messages"]]


@pytest.mark.slow
def test_a_rank_that_offloads_later_takes_over_the_others_plan(three: dict[str, list[Any]]) -> None:
    last = {one["followed"][-1] for one in three["late"]}
    assert len(last) == 1
    assert last != {""}


def assert_is_alone(left: dict[str, Any]) -> None:
    assert left["followed"][-1], "it has a plan of its own"
    (message,) = left["messages"]
    assert "plans for itself" in message


def test_a_rank_outlives_another_that_is_killed(two: dict[str, list[Any]]) -> None:
    assert_is_alone(two["killed-0"][1])


@pytest.mark.slow
def test_the_rank_with_the_store_outlives_another_that_is_killed(daemon: DaemonProcess) -> None:
    assert_is_alone(run(["killed-1"], daemon)["killed-1"][0])


def test_a_rank_whose_process_group_is_destroyed_plans_at_once(client: storm.Client) -> None:
    """It would wait for the figures of ranks that it has left."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    offload = client.offload(model, min_bytes=1024)

    def train() -> None:
        for _ in range(4):
            with offload:
                loss = model(torch.ones(64, 64)).square().sum()
            loss.backward()

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        train()
        assert offload.plan is None, "the other rank has not shown its steps"
    finally:
        dist.destroy_process_group()
    train()
    assert offload.plan is not None


def test_what_does_not_return_is_not_waited_for() -> None:
    ends = threading.Event()
    try:
        with pytest.raises(TimeoutError, match="no answer"):
            within(0.01, ends.wait)
    finally:
        ends.set()
    with pytest.raises(KeyError):
        within(5.0, lambda: {}["nothing"])
    assert within(5.0, lambda: "something") == "something"
