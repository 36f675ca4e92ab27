"""Small results that leave together: compiled code keeps them until there are several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.native import loader as native
from storm_client.planner.machine import CPU
from storm_client.results import Results
from support.following import Followed, follow_by
from support.in_place_lane import InPlaceCpuLane
from support.interrupted_sends import interrupt_second
from support.training import assert_identical, seeded
from support.waiting import wait_until
from torch import Tensor

LENGTH = 40
LEARNED = 2
"""Steps before one that compiled code follows."""

STEPS = LEARNED + 2

OFFLOAD = 1
"""What::OFFLOAD of script.h."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    return follow_by("compiled", monkeypatch)


class Left(list[int]):
    """How many have left as one range, each time."""

    apart = 0
    """How many have left by themselves, a call for several of them."""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Left:
    noted = Left()
    unshared, together = Results.offload_unshared, Results.offload_waiting

    def offload_unshared(self: Any, units: list[Any]) -> Any:
        noted.extend(len(members) for _, _, members in units)
        return unshared(self, units)

    def offload_waiting(self: Any, kept: list[Any]) -> None:
        noted.apart += len(kept)
        together(self, kept)

    monkeypatch.setattr(Results, "offload_unshared", offload_unshared)
    monkeypatch.setattr(Results, "offload_waiting", offload_waiting)
    return noted


@pytest.fixture(params=["staged", "in place"])
def any_client(request: pytest.FixtureRequest) -> Iterator[storm.Client]:
    """A client whose thread copies what it sends, and one whose daemon reads where it lies."""
    if request.param == "staged":
        yield request.getfixturevalue("client")
        return
    daemon = request.getfixturevalue("make_late_daemon")()
    (lanes := request.getfixturevalue("lanes")).clear()
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        yield client
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)


def offload(client: storm.Client) -> storm.Offload:
    return client.offload(min_bytes=256, budget=0.0, replay=False, codec="raw")


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
    return x.grad.clone()


def leaf(device: str) -> Tensor:
    return seeded(device, 16, 64, grad=True)


Case = Callable[[Tensor], Tensor]
"""Returns a loss."""

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


case(chain)


@case
def views_and_duplicates(x: Tensor) -> Tensor:
    for _ in range(6):
        y = (x * 1.01).exp()
        left, right = y.chunk(2, dim=1)
        x = torch.cat([left * right, right.flip(0) * left], dim=1).tanh()
    return (x * x).sum()


@case
def types(x: Tensor) -> Tensor:
    loss = x.sum()
    for dtype in (torch.float64, torch.bfloat16, torch.complex64) * 3:
        y = x.to(dtype).sin()
        loss = loss + (y * y.exp()).abs().float().sum()
    return loss + chain(torch.complex(x, x.cos()).conj().exp()._neg_view().abs(), 4)


@case
def odd_sizes(x: Tensor) -> Tensor:
    loss = x.sum()
    for size in range(256, 274):
        loss = loss + x.flatten()[:size].bfloat16().sin().tanh().exp().float().sum()
    return loss


@case
def too_large_to_be_copied(x: Tensor) -> Tensor:
    """Each leaves from where it lies, with what was saved of its storage besides."""
    y = torch.cat([x] * 1088)  # of more than 4 MiB
    for _ in range(9):
        left, right = (y * 1.01).sin().split(y.shape[0] // 2)
        y = torch.cat([left * right, right.exp() * left])
    return y.sum() + chain(x, 4)


@case
def written_to_while_it_waits(x: Tensor) -> Tensor:
    """By what no version counts: PyTorch reads what is there in the backward pass."""
    loss = x.sum()
    for _ in range(10):
        y = (x * 1.5).exp()
        z = y.sin()
        y.data.mul_(2)
        if x.device.type == "cpu":
            y.detach().numpy(force=False)[0] = 3
        loss = loss + z.sum()
    return loss


@case
def held_for_long(x: Tensor) -> Tensor:
    held = []
    for _ in range(20):
        x = x.sin() * 1.01
        held.append(x)
    return torch.stack(held).exp().sum()


class Holds(torch.autograd.Function):
    """Looks at what it has saved: each is memory of its own, shared by those that shared it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        places = [
            (one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in saved
        ]
        assert all(nbytes == saved[0].nbytes for _, nbytes in places)
        assert len(set(places)) == len(saved) - 1
        assert places[0] == places[1]
        assert saved[1].storage_offset() == 0
        return grad, *(None for _ in saved)


@case
def each_has_memory_of_its_own(x: Tensor) -> Tensor:
    y = x.exp()
    made = [y, y.view_as(y), *(x.sin() * n for n in range(1, 12))]
    loss = Holds.apply(x, *made).sum()
    del y, made
    return loss + chain(x)


def compare_cases(client: storm.Client, device: str, compiled: Followed) -> None:
    for name, function in CASES.items():
        x, block = leaf(device), offload(client)
        expected = gradient(x, None, function)
        for _ in range(STEPS):
            assert torch.equal(gradient(x, block, function), expected), name
        assert compiled[-1], name


def test_each_case(any_client: storm.Client, compiled: Followed, left: Left) -> None:
    compare_cases(any_client, "cpu", compiled)
    assert max(left) == 16, "small ones leave together, but not too many"
    assert sum(left) > 4 * left.apart


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_each_case_on_a_gpu(client: storm.Client, compiled: Followed, left: Left) -> None:
    compare_cases(client, "cuda", compiled)
    assert max(left) == 16


def test_a_graph_that_is_gone_through_in_parts_and_again(
    any_client: storm.Client, compiled: Followed
) -> None:
    def ways(block: Any) -> list[Tensor]:
        x = leaf("cpu")
        with block:
            loss = chain(x) + (other := chain(x * 2)) * 2
        grads = [*torch.autograd.grad(other, x, retain_graph=True)]
        for retained in (True, True, False):
            grads += torch.autograd.grad(loss, x, retain_graph=retained)
        return grads

    expected, block = ways(nullcontext()), offload(any_client)
    for _ in range(STEPS):
        assert_identical(ways(block), expected)
    assert compiled[-1]


def test_threads_that_go_back_at_once(any_client: storm.Client, compiled: Followed) -> None:
    x, block = leaf("cpu"), offload(any_client)
    expected = gradient(x)
    for _ in range(LEARNED):
        gradient(x, block)
    with block:
        losses = [chain(x) for _ in range(3)]
    with ThreadPoolExecutor(len(losses)) as threads:
        found = threads.map(lambda loss: torch.autograd.grad(loss, x, retain_graph=True)[0], losses)
        assert_identical(list(found), [expected] * len(losses))


def test_what_dies_is_not_brought_back(
    client: storm.Client, compiled: Followed, left: Left
) -> None:
    """Its bytes are given up with the last of those beside it."""
    x, block = leaf("cpu"), offload(client)
    for _ in range(LEARNED):
        gradient(x, block)
    with block:
        first, second = chain(x), chain(x * 2)
    del first
    client.status()  # by then what died has been released
    assert left
    assert client.status().entries > 0
    del second
    wait_until(lambda: client.status().entries == 0, 30, client.status)


def test_what_is_dropped_before_it_leaves_is_not_sent(
    device: str, client: storm.Client, compiled: Followed, left: Left
) -> None:
    x, block = leaf(device), offload(client)

    def step() -> None:
        with block:
            chain(x, 6)  # nobody keeps it

    for _ in range(STEPS):
        step()
    stored = block.stats().offloaded_bytes
    left.clear()
    for _ in range(STEPS):
        step()
    assert compiled[-1]
    assert sum(left) == 0
    assert block.stats().offloaded_bytes - stored < STEPS * 3 * x.nbytes


def test_a_result_that_is_changed_is_refused(
    device: str, client: storm.Client, compiled: Followed
) -> None:
    """Before it has left, and after that."""
    x = leaf(device)

    def changed(x: Tensor, behind: int, *, changes: bool) -> Tensor:
        y = (x * 2).exp()
        z = y.sin()
        more = chain(x, behind) if behind else 0.0
        if changes:
            y.mul_(2)
        return z.sum() + more

    for behind in (0, 30):
        block = offload(client)
        unchanged = partial(changed, behind=behind, changes=False)
        expected = gradient(x, None, unchanged)
        for _ in range(STEPS):
            assert torch.equal(gradient(x, block, unchanged), expected)
        with block:
            loss = changed(x, behind, changes=True)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 1"):
            loss.backward()


@pytest.mark.parametrize("strikes", [1, 8, 19])
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
    leave, calls = Results._offload, 0

    def interrupted(self: Results, *arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == strikes:
            raise KeyboardInterrupt
        leave(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Results, "_offload", interrupted)
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
    monkeypatch.setattr(Results, "_offload", leave)
    outputs.clear()
    assert torch.equal(half, gradient(x, None, lambda x: chain(x, length)))
    assert torch.equal(gradient(x, block), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_what_was_copied_whole(
    when: str,
    any_client: storm.Client,
    compiled: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, block = leaf("cpu"), offload(any_client)
    for _ in range(LEARNED):
        gradient(x, block)
    interrupt_second(monkeypatch, when)
    made = [x]

    def until_struck(x: Tensor) -> Tensor:
        for _ in range(LENGTH):
            x = x.sin() * 1.01
            made.append(x)
            del made[0]
        return x.sum()

    with pytest.raises(KeyboardInterrupt), block:
        until_struck(x)
    assert compiled[-1]
    (grad,) = torch.autograd.grad(made[0].sum(), x)
    y, length = x, 0
    while not torch.equal(y, made[0]):
        y, length = y.sin() * 1.01, length + 1
    assert torch.equal(grad, torch.autograd.grad(y.sum(), x)[0])
    assert length > 16, "two bundles were full"


def test_what_the_daemon_does_not_take_is_kept(
    make_daemon: Callable[..., Any], compiled: Followed, left: Left
) -> None:
    daemon = make_daemon("--pool-bytes", "1MiB", "--cache-bytes", "0")
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        x = seeded("cpu", 64, 200, grad=True)
        expected, block = (
            gradient(x),
            client.offload(min_bytes=256, codec="raw", budget=0.0, replay=False),
        )
        for _ in range(STEPS):
            assert torch.equal(gradient(x, block), expected)
        assert compiled[-1]
        assert left
        assert block.stats().kept


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


def test_plans_are_made_from_what_offloading_has_cost_the_thread(
    make_late_daemon: Callable[..., Any],
    lanes: list[InPlaceCpuLane],
    compiled: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it copies nothing itself: bytes have figures of their own."""
    monkeypatch.setattr(InPlaceCpuLane, "budget_bytes", 16 << 10)  # so that all leaves
    daemon = make_late_daemon()
    lanes.clear()
    with storm.connect(daemon.address, embedded="never", timeout=30) as client:
        x, block = leaf("cpu"), offload(client)
        for _ in range(20):
            gradient(x, block)
        (known,) = block._planning._signatures._known.values()
        machine = block._planning.maker.measured(known)
        assert "thread" in machine.measured
        assert machine.thread_store != CPU.thread_store
        lanes[0].unread.read_all()
        wait_until(lambda: client.status().entries == 0, 30, client.status)
    assert compiled[-1]


@pytest.mark.usefixtures("compiled")
def test_a_tensor_that_is_moved_while_it_is_offloaded_comes_from_where_it_was_moved() -> None:
    """Another thread whose memory has run out moves it, as this thread is about to release it."""
    follow: Any = native.module()
    unpacked = []

    def offload_waiting(waiting: list[Any]) -> None:
        for kept in waiting:
            assert kept.describe() is not None
            kept.move("moved")
            kept.release("offloaded")

    def unpack(handle: object) -> Tensor:
        unpacked.append(handle)
        return torch.ones(64)

    nothing = lambda *_: None  # noqa: E731
    hooks = [nothing] * 11
    hooks[3], hooks[4] = unpack, offload_waiting
    tallies = follow.Tallies()
    row = tallies.add_row()
    events = [(0, OFFLOAD, 256, (), row, 0, False, True, None)]
    script = follow.Script(events, [(256, False)], 1, False)
    follower = follow.Follower(
        script, tallies, follow.ModelStorages([], []), tuple(hooks), 128, row, row
    )
    x = torch.ones(64, requires_grad=True)
    follower.batch_offloads(x, 1 << 20, False)
    with torch.autograd.graph.saved_tensors_hooks(follower.pack, follower.unpack):
        held = x * 2
        y = held.sin()
    follower.end()
    y.sum().backward()
    assert unpacked == ["moved"]
