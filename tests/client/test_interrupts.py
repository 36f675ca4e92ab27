"""Ctrl-C at any moment ends in KeyboardInterrupt, and leaves everything as it should be."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import storm_client as storm
import torch
from storm_client.native import loader as native
from storm_client.transport.interrupts import SafeCondition
from support.daemon_process import DaemonProcess
from support.following import PATHS, follow_by
from support.interrupting import interrupted_after
from support.planning import replay_all
from support.training import assert_identical, seeded, trained
from support.waiting import wait_until
from torch.overrides import TorchFunctionMode

IN_ONE_TEST = 120


def some_and_all(some: int, all_: int) -> list[object]:
    """How often what depends on chance is tried: the slow tests do it all."""
    return [*range(some), *(pytest.param(n, marks=pytest.mark.slow) for n in range(some, all_))]


EXAMPLE = """
import signal
import sys
import torch
import storm_client as storm

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
torch.set_num_threads(1)
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
client = storm.connect(sys.argv[1], embedded="never")  # closed at exit
offload = client.offload(net, min_bytes=1)
for step in range(1000000):
    with offload:
        loss = net(torch.ones(256, 256)).square().sum()
    loss.backward()
    if step == 5:
        print("training", flush=True)
"""


def hooks_are_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def until_interrupted(function: Callable[[], object], fired: list[int]) -> None:
    """Run it again and again; an interrupt that is lost ends that, too."""
    before = len(fired)
    while len(fired) == before:
        function()


@pytest.fixture(autouse=True)
def no_garbage_of_others() -> None:
    """What tests before have left must not die here: a death that runs Python code, as that of a
    thread or a task does in the standard library, loses an interrupt.
    """
    gc.collect()
    gc.freeze()  # and stays so, as what imports have made does


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of torch's would wait for each other where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fate", [pytest.param("offloaded", marks=pytest.mark.slow), "recomputed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("seed", some_and_all(1, 8))
@pytest.mark.usefixtures("one_thread")
def test_no_interrupt_is_lost(
    seed: int, path: str, fate: str, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow_by(path, monkeypatch)
    if fate == "recomputed":
        replay_all(monkeypatch)
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        interrupt_often(seed, client)
        wait_until(lambda: client.status().entries == 0, 30, client.status)
        assert client.status().pool.used_bytes == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("one_thread")
def test_no_interrupt_leaves_a_generator_with_another_state(
    path: str, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow_by(path, monkeypatch)
    replay_all(monkeypatch)
    layers = [torch.nn.Linear(48, 48), torch.nn.Dropout(0.2), torch.nn.Tanh()]
    net, x = torch.nn.Sequential(*layers, *layers, *layers), seeded("cpu", 32, 48)
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        interrupt_backward_passes(net, x, client)


def interrupt_backward_passes(net: torch.nn.Module, x: torch.Tensor, client: storm.Client) -> None:
    offload = client.offload(net, min_bytes=1)
    for _ in range(10):
        trained(net, x, lambda: offload)
    assert offload.stats().replayed_bytes > 0
    chance, fired = random.Random(0), []
    for number in range(IN_ONE_TEST):
        with offload:
            loss = net(x).square().mean()
        state = torch.get_rng_state()

        def backward() -> None:
            loss.backward(retain_graph=True)  # noqa: B023 - called in this iteration

        with (
            pytest.raises(KeyboardInterrupt),
            interrupted_after(chance.random() * 2e-3, fired),
        ):
            until_interrupted(backward, fired)
        assert len(fired) == number + 1
        assert torch.equal(torch.get_rng_state(), state)


def network() -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """Return one, and the blocks among its modules."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Tanh()) for _ in range(4)]
    modules = [m for block in blocks for m in (block, torch.nn.Linear(96, 48))]
    return torch.nn.Sequential(*modules), blocks


def interrupt_often(seed: int, client: storm.Client) -> None:
    net, _ = network()
    x = seeded("cpu", 32, 48)

    def step() -> list[torch.Tensor]:
        net.zero_grad()
        return trained(net, x, lambda: offload)

    net.zero_grad()
    expected = [value.clone() for value in trained(net, x, nullcontext)]
    offload = client.offload(net, min_bytes=1)
    began = time.perf_counter()
    for _ in range(10):
        step()
    seconds = (time.perf_counter() - began) / 10
    chance, fired = random.Random(seed), []
    for number in range(IN_ONE_TEST):
        with pytest.raises(KeyboardInterrupt), interrupted_after(chance.random() * seconds, fired):
            until_interrupted(step, fired)
        assert len(fired) == number + 1
        assert not hooks_are_on()
        follow = native.module()
        assert follow is None or follow.watchers() == 0
        assert_tables_are_right(client)
        if number % 20 == 0:
            assert_identical(step(), expected)
    gc.collect()
    client._supply.sessions.settle(30)
    wait_until(lambda: has_whole_staging_area(client), 30, lambda: client._supply.sessions)


def assert_tables_are_right(client: storm.Client) -> None:
    """Check what an interrupt has left, once the reply that it may have struck is handled."""
    for session in client._supply.sessions.open:
        with session.connection.lock:
            session.connection.flush()
            session.transfers.assert_invariants()


def has_whole_staging_area(client: storm.Client) -> bool:
    """Tell whether what was given up has all been given back."""
    gc.collect()
    for session in client._supply.sessions.open:
        with session.connection.lock:
            session.on_wake()
            session.connection.flush()
            session.transfers.assert_invariants()
            space = session.transfers._space
            space.reclaim()
            if space.free_bytes != space.capacity:
                return False
    return True


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", some_and_all(1, 8))
def test_layers_that_are_named_are_right_behind_interrupts(
    seed: int, daemon: DaemonProcess
) -> None:
    """PyTorch's own checkpoint may lose one, in a weak reference's callback, leave hooks on, or
    leave this thread in an `autocast` that has ended, so that casts of weights are never dropped.
    """
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        interrupt_named_layers(seed, client)


def interrupt_named_layers(seed: int, client: storm.Client) -> None:
    net, blocks = network()
    x = seeded("cpu", 32, 48)
    offload = client.offload(net, min_bytes=1, layers=blocks)

    def step() -> list[torch.Tensor]:
        net.zero_grad()
        return trained(net, x, lambda: offload)

    expected = [value.clone() for value in trained(net, x, nullcontext)]
    step()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    chance, fired = random.Random(seed), []
    try:
        for _ in range(IN_ONE_TEST // 4):
            with (
                suppress(KeyboardInterrupt),
                interrupted_after(chance.random() * seconds, fired),
            ):
                until_interrupted(step, fired)
            assert_identical(step(), expected)
    finally:
        while hooks_are_on():
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for _ in range(torch.autocast_increment_nesting()):
            torch.autocast_decrement_nesting()
    gc.collect()
    step()
    assert not any("forward" in vars(module) for module in net.modules())


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_close_is_finished_by_the_next(daemon: DaemonProcess) -> None:
    chance, fired = random.Random(3), []
    for number in range(40):
        client = storm.connect(daemon.address, embedded="never", timeout=30)
        net = torch.nn.Linear(32, 32)
        with client.offload(net, min_bytes=1):
            loss = net(torch.ones(32, 32)).exp().sum()
        with pytest.raises(KeyboardInterrupt), interrupted_after(chance.random() * 0.004, fired):
            until_interrupted(client.close, fired)
        assert len(fired) == number + 1
        client.close()
        del loss
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        wait_until(lambda: len(client.status().sessions) == 1, 30, client.status)
        assert client.status().pool.used_bytes == 0


@pytest.mark.parametrize("attempt", some_and_all(1, 20))
def test_a_script_ends_at_the_first_sigint(
    attempt: int, daemon: DaemonProcess, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(EXAMPLE)
    process = subprocess.Popen(
        [sys.executable, script, daemon.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "training\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT
    assert "ignored" not in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_block_left_by_an_interrupt_before_its_exit_has_begun(client: storm.Client) -> None:
    """Python may raise when it calls `__exit__`, before the first line of that."""
    offload = client.offload(min_bytes=1)

    def interrupt(frame: object, event: str, argument: object) -> None:
        if event == "call":
            sys.setprofile(None)
            raise KeyboardInterrupt

    def step() -> None:
        with offload:
            torch.ones(8, requires_grad=True).exp()
            sys.setprofile(interrupt)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert not hooks_are_on()


class Other(TorchFunctionMode):
    """Somebody else's mode, which changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["lost", "below"])
def test_a_block_whose_mode_is_not_where_it_was(client: storm.Client, kind: str) -> None:
    """PyTorch takes a mode off while it runs, and an interrupt may strike before it is sure to be
    put back; or with another's, and that stays on top.
    """
    pop, push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack
    net, outer, inner = torch.nn.Linear(64, 64), Other(), Other()
    with outer:
        with suppress(KeyboardInterrupt), client.offload(net, min_bytes=1):
            net(torch.ones(64, 64))
            if kind == "lost":
                pop()
            else:
                push(inner)
            raise KeyboardInterrupt
        assert not hooks_are_on()
        left = [outer] if kind == "lost" else [outer, inner]
        assert torch._C._len_torch_function_stack() == len(left)
        for index, mode in enumerate(left):
            assert torch._C._get_function_stack_at(index) is mode
        if kind == "below":
            pop()


def test_who_waits_has_the_lock_afterwards() -> None:
    from threading import RLock

    lock = RLock()
    changes, fired = SafeCondition(lock), []
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt), lock, interrupted_after(0.002, fired):
            until_interrupted(lambda: changes.wait(1e-6), fired)
        assert lock.acquire(blocking=False)
        lock.release()
    assert len(fired) == 5
