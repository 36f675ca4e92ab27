"""One process that trains on several GPUs has a lane on each, and its gradients are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_bench.child_daemon import ChildDaemon
from support import second_gpu_alone
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs 2 CUDA devices, {torch.cuda.device_count()} here",
    ),
    pytest.mark.timeout(300),
]

WIDTH, ROWS = 1024, 2048
STEPS = 16
"""So many that plans are learned, tried, followed, and made anew with what was timed."""

FLAGS = ["--pool-bytes=1GiB", "--staging-bytes-cuda=8MiB", "--part-bytes-cuda=2MiB"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=[*FLAGS, "--device=cuda"], start_seconds=120.0) as started:
        yield started


@pytest.fixture
def client(daemon: ChildDaemon) -> Iterator[storm.Client]:
    with storm.connect(daemon.address, embedded="never", timeout=30.0) as made:
        yield made


def half(device: str) -> nn.Sequential:
    layers = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)
    ]
    return nn.Sequential(*layers).to(device)


class Halves(nn.Module):
    """Two halves by hand, and a loss on the device of the `last`."""

    def __init__(self, first: str, second: str, last: str) -> None:
        super().__init__()
        self.first, self.second, self.last = half(first), half(second), last
        self.devices = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x.to(self.devices[0])).to(self.devices[1]))
        return x.to(self.last).square().mean()


class Part(nn.Module):
    """One with a residual of its own, as a decoder's layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = half("cpu")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Tower(nn.Module):
    """What hooks have been put on, that move what each part is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


def dispatched() -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    places = {"parts.0": 0, "parts.1": 1, "parts.2": 1, "parts.3": 0}
    return accelerate.dispatch_model(Tower(), device_map=places)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "halves": lambda: Halves("cuda:0", "cuda:1", "cuda:1"),
    "halves, second device first": lambda: Halves("cuda:1", "cuda:0", "cuda:0"),
    "a loss where the first layer is": lambda: Halves("cuda:0", "cuda:1", "cuda:0"),
    "a loss on the first device": lambda: Halves("cuda:1", "cuda:1", "cuda:0"),
    "dispatched": dispatched,
}


def gradients(net: nn.Module, x: Tensor, context: AbstractContextManager[object]) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    with context:
        loss = net(x)
    loss.backward()
    grads = [parameter.grad for parameter in net.parameters()]
    return [loss.detach(), *(one.clone() for one in grads if one is not None)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("options", [{}, {"budget": 0.5}, {"budget": "fit"}, {"verify": "always"}])
def test_a_model_on_two_devices_trains_as_without_offload(
    name: str, current: int, options: dict[str, object], client: storm.Client
) -> None:
    torch.manual_seed(0)
    net = MODELS[name]()
    x = torch.randn(ROWS, WIDTH, device="cuda:0")
    with torch.cuda.device(current):
        expected = gradients(net, x, nullcontext())
        offload = client.offload(net, min_bytes=1 << 16, **options)  # type: ignore[arg-type]
        for _ in range(STEPS):
            assert all(map(torch.equal, gradients(net, x, offload), expected))
        assert torch.cuda.current_device() == current
    assert [one.device for one in client.status().sessions].count("cuda") == 2
    stats = offload.stats()
    assert stats.offloaded_bytes + stats.replayed_bytes > ROWS * WIDTH * 4


def test_streams_of_each_device(client: storm.Client) -> None:
    torch.manual_seed(0)
    net = Halves("cuda:0", "cuda:1", "cuda:1")
    x = torch.randn(ROWS, WIDTH, device="cuda:0")
    expected = gradients(net, x, nullcontext())
    offload = client.offload(net, min_bytes=1 << 16)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream(0)), torch.cuda.stream(torch.cuda.Stream(1)):
        for _ in range(STEPS):
            found = gradients(net, x, offload)
            assert all(map(torch.equal, found, expected))


def test_what_is_sent_from_two_devices_has_arrived() -> None:
    found: list[list[Tensor]] = []
    with storm.Receiver(found.append) as receiver:
        for number in range(8):
            values = [torch.full((1 << 20,), number, device=f"cuda:{n}") for n in (0, 1)]
            receiver(values)
    for number, pair in enumerate(found):
        assert all(bool((one == number).all()) for one in pair)


def test_a_feeder_feeds_the_device_that_was_current_where_it_was_made() -> None:
    with torch.cuda.device(1):
        feeder = storm.Feeder([torch.ones(4)] * 3)
        assert [one.device.index for one in feeder] == [1, 1, 1]


def test_the_first_device_is_not_touched_where_all_is_on_the_second(daemon: ChildDaemon) -> None:
    """A context there would take some hundred MiB of somebody else's memory."""
    subprocess.run(
        [sys.executable, str(Path(second_gpu_alone.__file__)), daemon.address],
        check=True,
        timeout=200.0,
    )
