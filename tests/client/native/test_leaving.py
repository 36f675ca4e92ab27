"""Small results that leave together: compiled code keeps them until there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import storm_client as storm
import torch
from storm_client import hooks
from support.daemon_thread import DaemonThread
from support.following import PATHS, Followed, follow_by
from support.in_place_lane import InPlaceCpuLane
from support.training import assert_identical, seeded
from support.waiting import wait_until
from torch import Tensor

LENGTH = 40
STEPS = 6


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    return follow_by("compiled", monkeypatch)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many have left together, each time."""
    counts: list[int] = []
    leave = hooks.StepHooks._leave_together

    def noted(self: hooks.StepHooks, kept: list[object]) -> None:
        counts.append(len(kept))
        leave(self, kept)  # type: ignore[arg-type]

    monkeypatch.setattr(hooks.StepHooks, "_leave_together", noted)
    return counts


def offload(client: storm.Client) -> storm.Offload:
    return client.offload(min_bytes=256, budget=0.0, replay=False)


def chain(x: Tensor, length: int = LENGTH) -> Tensor:
    """Save each result, and hold none."""
    for _ in range(length):
        x = x.sin() * 1.01
    return x.sum()


def gradient(
    x: Tensor, block: object = None, function: Callable[[Tensor], Tensor] = chain
) -> Tensor:
    """Return the gradient of a step whose forward pass runs in a block."""
    x.grad = None
    if block is None:
        loss = function(x)
    else:
        with block:  # type: ignore[attr-defined]
            loss = function(x)
    loss.backward()
    assert x.grad is not None
    return x.grad.clone()


def leaf(device: str) -> Tensor:
    return seeded(device, 16, 64, grad=True)


def test_several_leave_at_a_time(
    device: str, client: storm.Client, compiled: Followed, together: list[int]
) -> None:
    x, block = leaf(device), offload(client)
    expected = gradient(x)
    for _ in range(STEPS):
        assert torch.equal(gradient(x, block), expected)
    assert compiled[-1]
    assert max(together) == 16, "small ones leave together, but not too many"
    assert sum(together) > 2 * len(together)


def test_both_paths_count_the_same(
    device: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(x: Tensor) -> Tensor:
        y = x.sin()
        return (y * y * y.t().contiguous().t()).exp().sum() + chain(y, 5)

    def counted(path: str) -> list[object]:
        with monkeypatch.context() as patched:
            followed = follow_by(path, patched)
            x, block = leaf(device), offload(client)
            for _ in range(STEPS):
                gradient(x, block, doubled)
            assert followed[-1] == (path == "compiled")
            found = block.stats()
            return [
                found.saved_bytes,
                found.deduplicated_bytes,
                found.offloaded_bytes,
                found.stored_bytes,
                dict(found.skipped),
                dict(found.kept),
            ]

    first, second = map(counted, PATHS)
    assert first == second


def test_what_is_dropped_before_it_leaves_is_not_sent(
    device: str, client: storm.Client, compiled: Followed, together: list[int]
) -> None:
    x, block = leaf(device), offload(client)

    def step() -> None:
        with block:
            chain(x, 6)  # nobody keeps it

    for _ in range(STEPS):
        step()
    stored = block.stats().offloaded_bytes
    together.clear()
    for _ in range(STEPS):
        step()
    assert compiled[-1]
    assert sum(together) == 0
    assert block.stats().offloaded_bytes - stored < STEPS * 3 * x.nbytes


def test_what_is_asked_for_in_its_block_is_there(
    device: str, client: storm.Client, compiled: Followed
) -> None:
    x, block = leaf(device), offload(client)
    expected = gradient(x)
    for _ in range(STEPS):
        x.grad = None
        with block:
            chain(x).backward()
        assert torch.equal(x.grad, expected)
    assert compiled[-1]


@pytest.mark.parametrize("behind", [0, 30])
def test_a_result_that_is_changed_is_refused(
    behind: int, device: str, client: storm.Client, compiled: Followed
) -> None:
    """Before it has left, and after that."""
    x, block = leaf(device), offload(client)

    def changed(x: Tensor, *, changes: bool) -> Tensor:
        y = (x * 2).exp()
        z = y.sin()
        more = chain(x, behind) if behind else 0.0
        if changes:
            y.mul_(2)
        return z.sum() + more

    expected = gradient(x, None, lambda x: changed(x, changes=False))
    for _ in range(STEPS):
        found = gradient(x, block, lambda x: changed(x, changes=False))
        assert torch.equal(found, expected)
    with block:
        loss = changed(x, changes=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1"):
        loss.backward()


def test_given_other_data_is_found_with_that(
    device: str, client: storm.Client, compiled: Followed
) -> None:
    x, block = leaf(device), offload(client)

    held: list[Tensor] = []

    def replaced(x: Tensor) -> Tensor:
        y = (x * 2).exp()
        held[:] = [y]
        z = (y * y).sum()
        y.data = torch.ones_like(y)
        return z

    expected = gradient(x, None, replaced)
    for _ in range(STEPS):
        assert torch.equal(gradient(x, block, replaced), expected)


@pytest.mark.parametrize("strikes", range(1, 20, 3))
def test_what_an_interrupt_leaves_behind_is_kept(
    strikes: int,
    device: str,
    client: storm.Client,
    compiled: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, block = leaf(device), offload(client)
    expected = gradient(x)
    for _ in range(STEPS):
        gradient(x, block)
    leave, calls = hooks.StepHooks._leave, 0

    def interrupted(self: hooks.StepHooks, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == strikes:
            raise KeyboardInterrupt
        leave(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(hooks.StepHooks, "_leave", interrupted)
    outputs = []

    def until_struck(x: Tensor) -> Tensor:
        for _ in range(LENGTH):
            outputs.append(x)  # whose graph outlives the block
            x = x.sin() * 1.01
        return x.sum()

    with pytest.raises(KeyboardInterrupt):
        gradient(x, block, until_struck)
    x.grad = None
    outputs[-1].sum().backward()
    half = x.grad.clone()
    length = len(outputs) - 1
    monkeypatch.setattr(hooks.StepHooks, "_leave", leave)
    outputs.clear()
    assert torch.equal(half, gradient(x, None, lambda x: plain(x, length)))
    assert torch.equal(gradient(x, block), expected)


def plain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.sin() * 1.01
    return x.sum()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_daemon_that_ends(
    keeps: bool,
    device: str,
    make_daemon: Callable[..., object],
    compiled: Followed,
) -> None:
    daemon = make_daemon("--pool-bytes", "64MiB")
    losses = "keep" if keeps else "raise"
    with storm.connect(
        daemon.address,
        embedded="never",
        timeout=30,
        on_daemon_loss=losses,  # type: ignore[attr-defined]
    ) as client:
        x, block = leaf(device), offload(client)
        expected = gradient(x)
        for _ in range(STEPS):
            assert torch.equal(gradient(x, block), expected)

        def ending(x: Tensor) -> Tensor:
            y = chain(x, 3)
            daemon.kill()  # type: ignore[attr-defined]
            session = client._supply.sessions.control
            wait_until(lambda: session.connection.lost, 30, lambda: "the daemon's end")
            return chain(x) + 0 * y

        if keeps:
            with suppress(storm.DaemonLost):  # what was sent is lost
                gradient(x, block, ending)
            with pytest.warns(RuntimeWarning, match="activations stay in memory"):
                assert torch.equal(gradient(x, block), expected)
        else:
            with pytest.raises(storm.DaemonLost):
                gradient(x, block, ending)


def test_in_place_a_number_is_published_for_all(
    make_late_daemon: Callable[..., DaemonThread],
    lanes: list[InPlaceCpuLane],
    compiled: Followed,
    together: list[int],
) -> None:
    daemon = make_late_daemon()
    x = leaf("cpu")
    expected = gradient(x)
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        block = offload(client)
        for _ in range(STEPS):
            assert_identical([gradient(x, block)], [expected])
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)
    assert compiled[-1]
    assert max(together) == 16
