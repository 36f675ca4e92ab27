"""Two GPUs of one host: a worker each, a trainer each, and a process that trains on both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support.trainers import Trainers, workers_of
from support.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices here"),
    pytest.mark.timeout(300),
]

FLAGS = ["--pool-bytes=1GiB", "--device=cuda"]


@pytest.fixture
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=FLAGS) as daemon:
        yield daemon


def test_each_gpu_has_its_worker(daemon: ChildDaemon, trainers: Trainers) -> None:
    """The bits of each trainer are right, and its tensors went over its own GPU's link."""
    count = torch.cuda.device_count()
    assert [one["devices"] for one in workers_of(daemon)] == [[f"cuda:{n}"] for n in range(count)]
    pids = [trainers.start(daemon.address, device=f"cuda:{n}") for n in range(2)]
    for pid in pids:
        trainers.expect(pid, "ready", *["same"] * 5)
    state = daemon.status()
    assert [one["sessions"] for one in state["workers"]][:2] == [1, 1]
    assert [gpu["device"] for gpu in state["gpus"]] == [f"cuda:{n}" for n in range(count)]
    assert all(gpu["link"]["store"]["bytes"] > 0 for gpu in state["gpus"][:2])


def test_a_killed_worker_ends_the_sessions_of_its_gpu_alone(
    daemon: ChildDaemon, trainers: Trainers
) -> None:
    pids = [trainers.start(daemon.address, device=f"cuda:{n}") for n in range(2)]
    for pid in pids:
        trainers.expect(pid, "ready", "same", "same")
    os.kill(workers_of(daemon)[1]["pid"], signal.SIGKILL)
    words = trainers.next(pids[1], 60.0).words
    while words == "same":
        words = trainers.next(pids[1], 60.0).words
    assert words.split()[-1] in ("DaemonLost", "ActivationLost"), words
    trainers.expect(pids[0], *["same"] * 5)
    wait_until(lambda: workers_of(daemon)[1]["phase"] == "serving", 60.0)
    third = trainers.start(daemon.address, device="cuda:1")
    trainers.expect(third, "ready", *["same"] * 3)


def test_a_process_that_trains_on_two_gpus_is_served_by_two_workers(daemon: ChildDaemon) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, device=f"cuda:{n}") for n in range(2)]
    x = torch.randn(4096, 512, device="cuda:0")

    def step() -> list[torch.Tensor]:
        for layer in layers:
            layer.zero_grad(set_to_none=True)
        hidden = torch.nn.functional.gelu(layers[0](x)).to("cuda:1")
        torch.nn.functional.gelu(layers[1](hidden)).square().mean().backward()
        gradients = [layer.weight.grad for layer in layers]
        return [one.clone() for one in gradients if one is not None]

    expected = step()
    with storm.connect(daemon.address, embedded="never") as client:
        offload = client.offload(torch.nn.ModuleList(layers), min_bytes=1 << 16)
        for _ in range(6):
            with offload:
                for layer in layers:
                    layer.zero_grad(set_to_none=True)
                hidden = torch.nn.functional.gelu(layers[0](x)).to("cuda:1")
                loss = torch.nn.functional.gelu(layers[1](hidden)).square().mean()
            loss.backward()
            found = [layer.weight.grad for layer in layers]
            assert all(map(torch.equal, found, expected))
        assert [one["sessions"] for one in workers_of(daemon)][:2] == [1, 1]
