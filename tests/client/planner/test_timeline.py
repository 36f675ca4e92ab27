"""What a step takes at each of its moments: of values made by hand, and beside recorded steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import storm_client as storm
import torch
from bench.saved_models import MODELS
from storm_bench.zoo.models import Workload
from storm_client.eager import controller
from storm_client.losses.deferred import USE
from storm_client.planner.decisions import OFFLOAD, REPLAY, Decision, Keep
from storm_client.planner.machine import CPU
from storm_client.planner.problem import NO_LOSS, PlainLoss, Problem
from storm_client.planner.solver import choose
from storm_client.planner.timeline import Timeline, checkpointed, kept_by_checkpointing, planned
from support.peak_memory import peak_bytes
from support.planning import alike_blocks, latest_problem, value
from support.same_bits import set_tiles
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

KEEP = Keep("budget")
MACHINE = replace(CPU, link=1.0, codec=0.1, thread_store=0.0, thread_recompute=0.0)

CHAIN = Problem(
    (
        replace(value(0, 10), is_given=True),
        value(1, 20, "norm", 0, seconds=1.0),
        value(2, 40, "linear", 1, saved=False, seconds=1.0),
        value(3, 80, "silu", 2, seconds=1.0),
    ),
    # The norm and the silu have saved what they were given and made, the loss the last value.
    used_between={0: (1, 1), 1: (2, 2), 3: (4, 3)},
)
GRADIENTS = [0, 20, 60, 120, 0]
"""Of values 1 to 3, each from its reader's moment to its own; the loss knows none of its own."""


def saved_bytes(*decisions: Decision) -> list[int]:
    found = planned(CHAIN, decisions).backward
    return [own - others for own, others in zip(found, GRADIENTS, strict=True)]


def test_what_is_kept_lies_there_until_its_last_use() -> None:
    assert saved_bytes(KEEP, KEEP, OFFLOAD, KEEP) == [0, 10, 30, 110, 110]


def test_what_was_offloaded_lies_there_from_its_first_use() -> None:
    assert saved_bytes(OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD) == [0, 10, 20, 80, 80]


def test_what_is_recomputed_has_what_it_is_made_from_there() -> None:
    """Value 2 only while value 3 is recomputed; the others until their own uses."""
    assert saved_bytes(OFFLOAD, REPLAY, REPLAY, REPLAY) == [0, 10, 30, 110, 10 + 20 + 40 + 80]


def test_what_is_kept_to_recompute_others_lies_there_until_it_is_read() -> None:
    """Value 2, which autograd does not save: nobody keeps it where nothing is made from it."""
    assert saved_bytes(OFFLOAD, OFFLOAD, KEEP, REPLAY) == [0, 10, 20, 80, 40 + 80]
    assert saved_bytes(OFFLOAD, OFFLOAD, KEEP, OFFLOAD) == [0, 10, 20, 80, 80]


def test_recomputation_reads_a_copy_of_what_no_operation_made() -> None:
    """As long as it is kept, in both passes."""
    decisions = [KEEP, REPLAY, OFFLOAD, KEEP]
    found = planned(CHAIN, decisions)
    made = planned(
        replace(CHAIN, values=(replace(CHAIN.values[0], is_given=False), *CHAIN.values[1:])),
        decisions,
    )
    assert [own - 10 for own in found.forward] == made.forward
    assert saved_bytes(*decisions) == [10, 10 + 10, 10 + 10 + 20, 10 + 10 + 80, 10 + 10 + 80]


def test_an_unknown_operation_makes_a_gradient_of_as_many_bytes() -> None:
    """As that of a loss does, which saves the logarithms of probabilities."""
    values = (*CHAIN.values[:3], value(3, 80))
    unknown = replace(CHAIN, values=values)
    before = planned(CHAIN, [KEEP, KEEP, OFFLOAD, KEEP])
    found = planned(unknown, [KEEP, KEEP, OFFLOAD, KEEP])
    assert found.backward[3] == before.backward[3] - GRADIENTS[3] + 2 * 80


def blocks(count: int) -> Problem:
    """Return a step of blocks with a loss behind them."""
    values, ends = alike_blocks(count)
    used = {n: (n + 1, n + 1) for n in range(len(values)) if n not in ends}
    values.append(value(len(values), 90, "log_softmax", len(values) - 1, seconds=1.0))
    used[len(values) - 1] = (len(values),) * 2
    return Problem(tuple(values), block_ends=ends, used_between=used)


def test_checkpointing_recomputes_a_block_where_its_backward_pass_begins() -> None:
    problem = blocks(3)
    assert kept_by_checkpointing(problem) == {4, 8, 12, 13}
    found = checkpointed(problem).backward
    gradients = planned(replace(problem, used_between={}), [OFFLOAD] * 14).backward
    saved = [own - others for own, others in zip(found, gradients, strict=True)]
    given = 2 * 40  # the ends of two blocks; nothing is made from that of the third
    assert saved[14] == given + 90
    assert saved[12] == given + 40 + 110 + 110
    assert saved[4] == 40 + 40 + 110 + 110


def two_streams(count: int, *, cached: bool = False) -> Problem:
    """Return a step of blocks that hand over a stream of 70 bytes beside that of 5.

    Only casts of the former are saved, in the next block.
    """
    values = [value(0, 70, "linear", saved=False), value(1, 5, "linear", saved=False)]
    ends = set()
    for _ in range(count):
        first, text = len(values), len(values) - 1
        images = text - 1
        values += [
            value(first, 140, "to", images, seconds=1.0),
            replace(value(first + 1, 70, "add", images, first, saved=False), is_cached=cached),
            value(first + 2, 5, "add", text, first, saved=False),
        ]
        ends.add(first + 2)
    used = {n: (n + 1, n + 1) for n in range(2, len(values), 3)}
    return Problem(tuple(values), block_ends=frozenset(ends), used_between=used)


def test_a_block_is_given_all_that_it_reads_of_the_one_before() -> None:
    problem = two_streams(3)
    assert kept_by_checkpointing(problem) == {3, 4, 6, 7, 10}
    assert kept_by_checkpointing(two_streams(3, cached=True)) == {4, 7, 10}
    gradients = planned(replace(problem, used_between={}), [OFFLOAD] * 11).backward
    found = checkpointed(problem).backward
    assert found[9] - gradients[9] == 70 + 140  # of the blocks before, only what the last one reads
    values = [replace(one, is_made_inside=True) for one in problem.values[:8]]
    frozen = replace(problem, values=(*values, *problem.values[8:]))
    assert kept_by_checkpointing(frozen) == {4, 6, 7, 10}  # 3 is read by what needs no gradient


def test_what_the_forward_pass_takes_leaves_no_room_later() -> None:
    """What is kept at a moment of the backward pass was there at that of the forward pass."""
    most = Timeline([50, 50], [100, 100, 100], [0, 0, 0])
    step = Timeline([10, 95], [60, 60, 60], [30, 0, 0])
    assert step.room_below(most) == [10, 5, 40]
    assert replace(step, finds_gradients=False).room_below(most) == [10, 5, 40]


@pytest.mark.parametrize("window", [0.0, 300.0, 2000.0])
def test_as_little_as_possible_is_at_no_moment_more_than_with_checkpointing(window: float) -> None:
    problem = replace(blocks(5), forward_seconds=window)
    least = planned(problem, choose(problem, MACHINE).decisions).backward
    most = checkpointed(problem).backward
    assert all(own <= others for own, others in zip(least, most, strict=True))


# --- beside recorded steps ----------------------------------------------------------------------

NEAR = 0.15
"""Of the recorded bytes: what operations need while they run, and tensors that are small."""


def train(work: Workload, offload: storm.Offload | None = None, *, caches: bool = False) -> None:
    enabled = work.autocast is not None
    with torch.autocast("cpu", work.autocast, enabled=enabled, cache_enabled=caches):
        if offload is None:
            loss = work.loss(work.model)
        else:
            with offload:
                loss = work.loss(work.model)
    loss.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("name", "caches"),
    [
        ("vit", False),
        ("vit", True),
        # Its conditions need no gradient. So autograd saves no casts of what reads them, and nobody
        # knows that autocast caches these.
        ("diffusion transformer", False),
        ("encoder", False),
        ("encoder", True),
    ],
)
def test_it_is_what_steps_take(client: storm.Client, name: str, caches: bool) -> None:
    torch.manual_seed(0)
    work = MODELS[name]()
    if not torch.cpu._is_avx512_bf16_supported():  # products of bfloat16 take copies in float32
        work = replace(work, autocast=None)
    offload = client.offload(work.model, min_bytes=2048)
    train(work, offload, caches=caches)
    signature = offload._planning._signatures.latest
    problem = offload._planning.maker.problem(signature)
    work.model.zero_grad()
    everything = planned(problem, [KEEP] * len(problem.values))
    assert_near(everything, work, caches=caches)
    blocks = {value.layer for value in signature.values if value.number in problem.block_ends}
    for layer in blocks:
        block = work.model.get_submodule(layer)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    work.model.zero_grad()
    assert_near(checkpointed(problem), work, caches=caches)


def test_what_autocast_caches_lies_there_until_the_forward_pass_ends() -> None:
    """Also where it is recomputed or offloaded; a kept value counts once.

    The loss's backward pass comes after the end of autocast.
    """
    values = (
        value(0, 10),
        *(value(n, 10, "to", seconds=1.0) for n in (1, 2)),
        value(3, 5, "mul", 0),
    )
    used = dict.fromkeys(range(3), (3, 3))
    problem = Problem(values, used_between=used)
    cached = replace(
        problem,
        values=(values[0], *(replace(one, is_cached=True) for one in values[1:3]), values[3]),
    )
    decisions = [KEEP, REPLAY, KEEP, OFFLOAD]
    before, found = planned(problem, decisions), planned(cached, decisions)
    assert [now - then for now, then in zip(found.forward, before.forward, strict=True)] == [
        0, 0, 10, 10,
    ]  # fmt: skip
    assert found.backward == before.backward


class Shifted(nn.Module):
    """Shifts a large tensor by what a wide product makes of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(64, 64), nn.Linear(256, 64)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.large(x).tanh() + self.small(condition)


def test_parameters_that_only_small_results_read_have_gradients_too(client: storm.Client) -> None:
    model = Shifted()
    x, condition = torch.randn(512, 64), torch.randn(1, 256)
    offload = client.offload(model, min_bytes=8192)
    with offload:
        loss = model(x, condition).square().sum()
    loss.backward()
    problem = latest_problem(offload)
    parameters = sum(one.nbytes for one in model.parameters())
    assert sum(one.parameter_bytes for one in problem.values) == parameters


class Gathering(nn.Linear):
    def __init__(self, index: Tensor) -> None:
        super().__init__(16, 16)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return (0 * x.detach()).index_add_(0, self.index, super().forward(x[self.index]).tanh())


def test_checkpointing_does_not_keep_what_a_block_makes_of_its_input(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first block gathers has no gradient either, and exists only in it."""
    monkeypatch.setattr(controller, "GRADLESS", 1.0)
    index = torch.randint(64, (640,))
    model = nn.Sequential(*(Gathering(index) for _ in range(3)))
    x = torch.randn(64, 16)
    offload = client.offload(model, min_bytes=2048)
    with offload:
        loss = model(x).square().sum()
    loss.backward()
    problem = latest_problem(offload)
    assert not any(one.is_made_inside for one in problem.values[1:])  # they begin as zeros
    first = problem.values[0]
    assert (first.nbytes, first.is_given, first.is_made_inside) == (640 * 64, True, True)
    assert problem.block_ends
    assert 0 not in kept_by_checkpointing(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_checkpointing_a_loss_takes_what_pytorchs_own_does(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The recorded step computes it in tiles, of logits that models cast to float32."""
    set_tiles(monkeypatch, 1 << 16)
    monkeypatch.setattr(USE, "differentiates_twice", False)
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(64, 64) for _ in range(4)), nn.Linear(64, 4096)).to(dtype)
    x, target = torch.randn(256, 64, dtype=dtype), torch.randint(4096, (256,))

    def loss(net: nn.Module) -> Tensor:
        return functional.cross_entropy(net(x).float(), target)

    work = Workload(model, loss, None)
    offload = client.offload(model, min_bytes=1024)
    for _ in range(5):
        train(work, offload)
    problem = latest_problem(offload)
    made = 256 * 4096 * 4
    cast = made if dtype != torch.float32 else 0
    assert problem.plain_loss == (made + cast, 3 * made - 256 * 4096 * dtype.itemsize)
    model.zero_grad()
    for block in model[:4]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert_near(checkpointed(problem), work)


def test_with_checkpointing_autocasts_casts_are_there_in_the_losss_forward_pass_alone() -> None:
    blocks_alone = blocks(3)
    head = replace(value(14, 300, "to", seconds=1.0), is_cached=True)
    problem = replace(
        blocks_alone,
        values=(*blocks_alone.values, head),
        used_between={**blocks_alone.used_between, 14: (0, 0)},
        plain_loss=PlainLoss(1000, 2000),
    )
    without = checkpointed(replace(problem, plain_loss=NO_LOSS))
    found = checkpointed(problem)
    assert found.forward[-1] == without.forward[-1] + 1000
    assert found.backward[-1] == without.backward[-1] + 2000
    uncached = replace(problem, values=(*blocks_alone.values, replace(head, is_cached=False)))
    assert checkpointed(uncached).backward == found.backward


@pytest.mark.parametrize("width", [64, 512])
def test_with_checkpointing_a_loss_under_autocast_takes_what_it_does(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Casts of wide layers take as much as the loss, which is fullest after autocast's end."""
    set_tiles(monkeypatch, 1 << 14)
    monkeypatch.setattr(USE, "differentiates_twice", False)
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(width, width) for _ in range(8)), nn.Linear(width, 4096))
    x, target = torch.randn(256, width), torch.randint(4096, (256,))
    work = Workload(
        model, lambda net: functional.cross_entropy(net(x).float(), target), torch.bfloat16
    )
    offload = client.offload(model, min_bytes=1024)
    for _ in range(5):
        train(work, offload, caches=True)
    problem = latest_problem(offload)
    assert problem.plain_loss.forward_bytes
    assert any(one.is_cached for one in problem.values)
    model.zero_grad()
    for block in model[:8]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert_near(checkpointed(problem), work, caches=True)


class Wrapping(torch.Tensor):
    """What PyTorch's functions are not told of, as collectives return it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        added = super().forward(x.tanh().sigmoid()).as_subclass(Wrapping)
        return (x + added) + added


def assert_near(predicted: Timeline, work: Workload, *, caches: bool = False) -> None:
    """Compare with what a step takes that finds no gradients, and then with one that does."""
    for nbytes in (predicted.peak_bytes, predicted.peak_bytes_beside_gradients):
        recorded = peak_bytes(lambda: train(work, caches=caches))
        assert abs(nbytes - recorded) < NEAR * recorded, (nbytes, recorded)
