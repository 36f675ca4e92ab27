"""A step with too little memory is exact, or ends in PyTorch's own error; the next one works.

python -m pytest tests/e2e/test_out_of_memory.py -m gpu
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client.native import loader as native
from storm_client.native.build import build
from storm_client.planner import shortage
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.timeout(600),
]

LIMITS = 30
SIDE = 2048
LAYERS = 16
MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[ChildDaemon]:
    build()
    assert native.module() is not None
    with ChildDaemon(flags=["--pool-bytes=8GiB", "--device=cuda"]) as started:
        yield started


@pytest.fixture
def client(daemon: ChildDaemon) -> Iterator[storm.Client]:
    """Connect for one test: a session that its first step opens ends with it, and is seen to."""
    with storm.connect(daemon.address, embedded="never", timeout=60) as made:
        yield made


@pytest.fixture(autouse=True)
def _all_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def weights() -> list[Tensor]:
    torch.manual_seed(5)
    made = torch.randn(LAYERS, 256, SIDE, device="cuda") / SIDE**0.5
    return [one.clone().requires_grad_() for one in made]


def forward(layers: list[Tensor]) -> Tensor:
    x = torch.linspace(-1, 1, 4 * SIDE * SIDE, device="cuda").view(4 * SIDE, SIDE)
    for one in layers:
        x = (x @ one.t() @ one).tanh() + x
    return x.square().mean()


def step(offload: storm.Offload, layers: list[Tensor]) -> list[Tensor]:
    for one in layers:
        one.grad = None
    with offload:
        loss = forward(layers)
    loss.backward()
    return [one.grad.clone() for one in layers]


def limit_to(nbytes: int) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))


@pytest.mark.parametrize("budget", [1.0, "least"])
def test_steps_are_exact_or_end_in_pytorchs_error(
    budget: float | str, client: storm.Client
) -> None:
    layers = weights()
    loss = forward(layers)
    loss.backward()
    del loss
    expected = [one.grad.clone() for one in layers]
    offload = client.offload(budget=budget)
    for _ in range(4):
        step(offload, layers)
    torch.cuda.reset_peak_memory_stats()
    step(offload, layers)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    least = torch.cuda.memory_allocated() + 64 * MIB
    exact: list[int] = []
    for index in range(LIMITS):
        limit = least + (peak + 512 * MIB - least) * index // (LIMITS - 1)
        shortage._SHORTAGES.clear()
        offload = client.offload(budget=budget)
        limit_to(1 << 50)
        for _ in range(4):
            step(offload, layers)
        limit_to(limit)
        try:
            found = step(offload, layers)
        except torch.OutOfMemoryError as error:
            assert "stormd: everything that can be offloaded from" in str(error)  # noqa: PT017 - or none at all
        else:
            exact.append(limit)
            assert all(map(torch.equal, found, expected))
            del found
        for one in layers:
            one.grad = None
        limit_to(1 << 50)
        found = step(offload, layers)
        assert all(map(torch.equal, found, expected))
        del found
    assert exact
    assert exact[-1] >= peak
    if budget == 1.0:
        assert exact[0] < peak - 512 * MIB, "nothing that was kept has left"


def test_the_plan_after_a_shortage_keeps_less(client: storm.Client) -> None:
    layers = weights()
    offload = client.offload(budget=1.0)
    for _ in range(4):
        step(offload, layers)
    torch.cuda.synchronize()
    before = offload.plan
    peak = torch.cuda.max_memory_allocated()
    limit_to(peak - 512 * MIB)
    shortage._SHORTAGES.clear()
    for _ in range(3):
        step(offload, layers)
    assert offload.plan.bytes_by_decision["keep"] < before.bytes_by_decision["keep"]
