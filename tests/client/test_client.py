from __future__ import annotations

import gc
import inspect
import os
import pickle
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
from support.daemon_process import DaemonProcess
from support.waiting import wait_until

import stormd

NET = torch.nn.Linear(2, 2)


def test_status(client: storm.Client, daemon: DaemonProcess) -> None:
    status = client.status()
    assert status.version == stormd.__version__
    assert status.uptime_seconds > 0
    assert status.pool.capacity_bytes == 256 << 20
    (mine,) = [session for session in status.sessions if session.pid == os.getpid()]
    assert (mine.uid, mine.device, mine.entries, mine.used_bytes) == (os.getuid(), "cpu", 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "zip"}, "codec is 'zip'.*ancf or raw"),
        ({"min_bytes": -1}, "min_bytes is -1"),
        ({"min_bytes": 1.5}, "min_bytes is 1.5"),
        ({"budget": "much"}, "budget is 'much'.*least, fit"),
        ({"budget": -1}, "budget is -1"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"verify": "never"}, "verify is 'never'; choose learn or always"),
        ({"replay": [3]}, "replay has int 3"),
        ({"replay": "no"}, "replay has str 'no'"),
        ({"model": [1]}, "got int 1 among its modules.*list of modules"),
        ({"model": 5}, "got int 5; pass the module"),
        ({"model": "gpt"}, "got str 'gpt'"),
        ({"model": torch.ones(2)}, "got Tensor; pass the module"),
        ({"model": {"net": NET}}, "got str 'net' among its modules"),
        ({"model": [NET, None]}, "got NoneType among its modules"),
        ({"min_byte": 1}, "no option 'min_byte': did you mean 'min_bytes'.*min_bytes, codec"),
        ({"xyz": 1}, "no option 'xyz': known are min_bytes, codec"),
        ({"pool_bytes": 1}, r"option of connect\(\).*connect\(pool_bytes=\.\.\.\).*client.offload"),
    ],
)
def test_bad_offload_options(
    client: storm.Client, options: dict[str, object], message: str
) -> None:
    with pytest.raises(storm.UsageError, match=message):
        client.offload(**options)


@pytest.mark.parametrize("budget", [np.int64(1 << 20), np.float64(0.5), np.float32(0.5)])
def test_sizes_and_fractions_may_be_numbers_of_numpy(client: storm.Client, budget: Any) -> None:
    offload = client.offload(NET, budget=budget, min_bytes=np.int64(4096))
    assert pickle.loads(pickle.dumps(offload))._policy.min_bytes == 4096
    assert offload._planning.options.budget == budget
    assert type(offload._planning.options.budget) in (int, float)
    with pytest.raises(storm.UsageError, match=r"budget is 1\.5"):
        client.offload(budget=np.float64(1.5))


def test_an_option_of_connect_is_sent_there(client: storm.Client) -> None:
    for name in inspect.signature(storm.connect).parameters:
        with pytest.raises(storm.UsageError, match=rf"{name} is an option of connect\(\)"):
            client.offload(None, **{name: 1})


def test_a_closed_client_says_so(daemon: DaemonProcess) -> None:
    client = storm.connect(daemon.address, timeout=30)
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = x.exp().sum()
    offload.stats()
    client.close()
    client.close()
    for use in (client.status, client.offload, offload.__enter__, client.cache.list):
        with pytest.raises(storm.UsageError, match=r"closed; call storm_client\.connect\(\)"):
            use()
    with pytest.raises(storm.DaemonLost, match=r"closed.*gone; call storm_client\.connect\(\)"):
        loss.backward()


def test_a_client_that_is_closed_in_a_block_says_what_to_do(daemon: DaemonProcess) -> None:
    client = storm.connect(daemon.address)
    offload = client.offload(min_bytes=1)
    x = torch.ones(64, 64, requires_grad=True)
    block = ExitStack()
    block.enter_context(offload)
    result = x.exp()
    client.close()
    with pytest.raises(storm.DaemonLost, match=r"call storm_client.connect\(\)"):
        block.close()
    result.sum().backward()  # it has stayed in memory
    assert torch.equal(x.grad, x.detach().exp())


def test_what_nobody_can_use_any_more_ends_by_itself(client: storm.Client) -> None:
    """A script that connects again and again without closing does not use up the sessions."""
    before = {thread for thread in threading.enumerate() if thread.name == "storm-io"}
    dropped = storm.connect(client.address, timeout=30)
    dropped.cache.contains("a")
    offload = dropped.offload(min_bytes=1)
    assert len(client.status().sessions) == 3
    del dropped
    gc.collect()
    wait_until(lambda: len(client.status().sessions) == 2, 30)  # that of the cache has ended
    x = torch.ones(64, 64, requires_grad=True)
    with offload:
        loss = x.exp().sum()
    del offload
    gc.collect()
    loss.backward()
    assert torch.equal(x.grad, x.detach().exp())
    del loss
    gc.collect()
    wait_until(lambda: len(client.status().sessions) == 1, 30)
    assert client.status().entries == 0
    wait_until(lambda: before == {t for t in threading.enumerate() if t.name == "storm-io"})


def test_a_client_of_several_modules(client: storm.Client) -> None:
    nets = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]
    offload = client.offload(iter(nets), min_bytes=1)
    with offload:
        loss = nets[1](nets[0](torch.ones(4, 64, requires_grad=True))).sum()
    loss.backward()
    assert offload.stats().skipped["parameter"] == 2


def test_a_client_closes_with_its_block_also_on_an_error(daemon: DaemonProcess) -> None:
    with pytest.raises(ZeroDivisionError), storm.connect(daemon.address, timeout=30) as client:
        raise ZeroDivisionError
    with pytest.raises(storm.UsageError, match="closed"):
        client.status()
