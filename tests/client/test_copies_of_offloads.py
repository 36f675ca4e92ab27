"""A module that holds its Offload is copied and pickled, as an EMA copy or a checkpoint is."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from storm_client import connecting
from support.daemon_process import DaemonProcess


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def holding(client: storm.Client) -> torch.nn.Sequential:
    """Return a network that refers to its Offload, which refers to the network."""
    net = network()
    net.offload = client.offload(net, min_bytes=1, codec="raw")
    return net


def gradients(net: torch.nn.Sequential) -> list[torch.Tensor]:
    net.zero_grad()
    with net.offload:
        loss = net(torch.ones(32, 64)).square().sum()
    loss.backward()
    return [parameter.grad for parameter in net.parameters()]


def is_right(net: torch.nn.Sequential) -> bool:
    plain = network()
    plain(torch.ones(32, 64)).square().sum().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    return all(map(torch.equal, gradients(net), expected))


def loaded(net: torch.nn.Sequential) -> torch.nn.Sequential:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[torch.nn.Sequential], torch.nn.Sequential]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "torch.save": loaded,
    "averaged": lambda net: torch.optim.swa_utils.AveragedModel(net).module,
}


@pytest.fixture(autouse=True)
def shared(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> object:
    """Have the shared client, which copies may find, connect here, and close it."""
    shared = connecting._Shared()
    monkeypatch.setattr(connecting, "_SHARED", shared)
    monkeypatch.setenv("STORMD_ADDRESS", daemon.address)
    yield shared
    if shared._connected is not None:
        connecting.atexit.unregister(shared._connected.close)
        shared._connected.close()


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_offloads_for_itself(way: str, client: storm.Client) -> None:
    net = holding(client)
    assert is_right(net)
    saved = net.offload.stats().saved_bytes
    other = COPIES[way](net)
    assert other.offload is not net.offload
    assert other.offload._policy.modules == (other,)
    assert other.offload.stats().saved_bytes == 0
    assert is_right(other)
    stats = other.offload.stats()
    assert stats.offloaded_bytes > 0
    assert set(stats.stored_by_mode) == {"raw"}
    assert stats.skipped["parameter"] > 0
    assert net.offload.stats().saved_bytes == saved
    assert is_right(net)


def test_a_copy_that_was_copied_in_a_block_is_outside_of_it(client: storm.Client) -> None:
    net = holding(client)
    with net.offload:
        other = copy.deepcopy(net)
        loss = net(torch.ones(32, 64)).sum()
    assert other.offload.stats().saved_bytes == 0
    assert is_right(other)
    loss.backward()


def test_unpickling_connects_to_nobody(client: storm.Client, shared: object) -> None:
    written = pickle.dumps(holding(client))
    threads = set(threading.enumerate())
    net = pickle.loads(written)
    assert net.offload.stats().saved_bytes == 0
    assert shared._connected is None
    assert set(threading.enumerate()) == threads
    assert is_right(net)
    assert shared._connected is not None
    assert pickle.loads(pickle.dumps(net)).offload._daemon.supply is None


def test_a_copy_of_a_closed_clients_offload_says_so(daemon: DaemonProcess) -> None:
    with storm.connect(daemon.address, timeout=30) as client:
        net = holding(client)
    with pytest.raises(storm.UsageError, match="the client is closed"), copy.deepcopy(net).offload:
        pass
