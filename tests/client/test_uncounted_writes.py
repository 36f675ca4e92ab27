"""What PyTorch does not count as a change, and sees in the backward pass all the same.

A saved tensor's memory can be written to without a version: through `.data`, NumPy, DLPack, a
collective, a sibling of `unsafe_chunk`, or by the very operation that saved it. PyTorch reads what
is there when the backward pass comes, so gradients with offload must be those of the same memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.comparing import Case, Plain, Way
from support.training import assert_identical, gradients, seeded
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_padded_sequence

CASES: dict[str, Case] = {}

ROWS, WIDTH = 2, 2048
"""Of the buffers that are written to row by row: half of a storage is worth storing all of it."""


def case(function: Case) -> Case:
    """Add a function to the cases that are tested."""
    CASES[function.__name__] = function
    return function


def assert_as_without(run: Case, device: str, client: storm.Client) -> None:
    """Compare two runs with one without offload; the second knows the order of the first."""
    expected = run(Plain(), device)
    offload = client.offload(min_bytes=1)
    for _ in range(2):
        assert_identical(run(offload, device), expected)
    assert offload.stats().saved_bytes > 0


def ended(way: Way, loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Go backward once what was saved has left; return the loss and the leaves' gradients."""
    way.stats()
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


# --- recurrent layers split their gates by unsafe_chunk -------------------------------------


@case
def gru_bidirectional(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.GRU(32, 32, num_layers=2, bidirectional=True, batch_first=True).to(device)
    x = seeded(device, 64, 4, 32, grad=True)
    with way:
        loss = module(x)[0].square().sum()
    return ended(way, loss, *module.parameters(), x)


@case
def lstm_of_packed_sequences(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.LSTM(32, 64).to(device)
    x = seeded(device, 5, 64, 32, grad=True)
    lengths = torch.arange(64).remainder(5).add(1).sort(descending=True).values
    with way:
        loss = module(pack_padded_sequence(x, lengths))[0].data.square().sum()
    return ended(way, loss, *module.parameters(), x)


@case
def siblings_of_unsafe_chunk(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, 2 * WIDTH, grad=True)
    with way:
        loss = torch.zeros((), device=device)
        for part in (x * 2).unsafe_chunk(2):
            loss = loss + (part.mul_(3).sigmoid_() ** 2).sum()
    del part
    return ended(way, loss, x)


@case
def siblings_of_unsafe_split_that_live_on(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, 2 * WIDTH, grad=True)
    with way:
        parts = (x * 2).unsafe_split(WIDTH)
        loss = torch.zeros((), device=device)
        for part in parts:
            loss = loss + (part.sigmoid_() ** 2).sum()
    return ended(way, loss, x)


# --- operations that fill what they have saved ----------------------------------------------


@case
def rrelu_twice_of_one_input_and_in_place(way: Way, device: str) -> list[Tensor]:
    module, x = nn.RReLU(0.1, 0.9), seeded(device, 64, WIDTH, grad=True)
    torch.manual_seed(0)
    with way:
        once, twice = x * 1, x * 1
        loss = (module(once) * module(once)).square().sum()
        loss = loss + F.rrelu(twice, training=True, inplace=True).square().sum()
    del once, twice
    return ended(way, loss, x)


# --- slices of one buffer, each written and then saved --------------------------------------


def write_data(rows: Tensor, i: int, value: Tensor) -> None:
    rows.data[i] = value


def write_through_dlpack(rows: Tensor, i: int, value: Tensor) -> None:
    torch.from_dlpack(rows.detach())[i] = value


def write_numpy(rows: Tensor, i: int, value: Tensor) -> None:
    rows.detach().numpy()[i] = value.numpy()


def all_reduce(rows: Tensor, i: int, value: Tensor) -> None:
    rows.data[i] = value * 2
    dist.all_reduce(rows.data[i], op=dist.ReduceOp.AVG if rows.is_cuda else dist.ReduceOp.MAX)


WRITES = {
    write.__name__: write for write in (write_data, write_through_dlpack, write_numpy, all_reduce)
}

Write = Callable[[Tensor, int, Tensor], None]


@pytest.fixture
def write(request: pytest.FixtureRequest, device: str) -> Iterator[Write]:
    """A way to fill a row; collectives have a group of one process for the test."""
    name = request.param
    if name == "write_numpy" and device != "cpu":
        pytest.skip("NumPy reaches the host's memory alone")
    if name != "all_reduce":
        yield WRITES[name]
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield WRITES[name]
    finally:
        dist.destroy_process_group()


each_write = pytest.mark.parametrize("write", WRITES, indirect=True)


@each_write
@pytest.mark.parametrize("rows_are", ["kept", "dropped", "a result"])
def test_rows_of_a_buffer_that_are_written_and_saved_in_turn(
    rows_are: str, write: Write, device: str, client: storm.Client
) -> None:
    def run(way: Way, device: str) -> list[Tensor]:
        weight = seeded(device, ROWS, WIDTH, grad=True)
        rows = torch.zeros(ROWS, WIDTH, device=device)
        with way:
            if rows_are == "a result":
                rows = weight * 2
            loss = torch.zeros((), device=device)
            for i in range(ROWS):
                write(rows, i, torch.full((WIDTH,), i + 1.0, device=device))
                loss = loss + (weight[i] * rows[i]).sum()
        if rows_are != "kept":
            del rows
        return ended(way, loss, weight)

    assert_as_without(run, device, client)


@each_write
def test_a_buffer_that_is_written_after_it_was_saved(
    write: Write, device: str, client: storm.Client
) -> None:
    def run(way: Way, device: str) -> list[Tensor]:
        weight = seeded(device, ROWS, WIDTH, grad=True)
        rows = seeded(device, ROWS, WIDTH, seed=2)
        with way:
            loss = (weight * rows).sum() + (weight.exp() * rows).sum()
            write(rows, 0, torch.full((WIDTH,), 7.0, device=device))
        write(rows, 1, torch.full((WIDTH,), 9.0, device=device))
        del rows
        return ended(way, loss, weight)

    assert_as_without(run, device, client)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_memory_that_numpy_lent(keeps: bool, client: storm.Client) -> None:
    def run(way: Way, device: str) -> list[Tensor]:
        array = np.ones(WIDTH, dtype=np.float32)
        x = seeded(device, WIDTH, grad=True)
        with way:
            lent = torch.from_numpy(array)
            loss = (x * lent).sum()
        if not keeps:
            del lent
        way.stats()
        array[:] = 5
        loss.backward()
        return [x.grad]

    assert_as_without(run, "cpu", client)


# --- running statistics ---------------------------------------------------------------------


@case
def copied_batch_norm_evaluated_and_trained(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    norm = copy.deepcopy(nn.BatchNorm1d(WIDTH).to(device))
    x = seeded(device, 32, WIDTH)
    scale = seeded(device, WIDTH, seed=2, grad=True)
    with way:
        loss = norm.eval()(x * scale).square().sum() + norm.train()(x * scale).square().sum()
        loss = loss + norm.eval()(x * scale).tanh().sum()
    del norm
    return ended(way, loss, scale)


# --- tensors that are given other data ------------------------------------------------------


@case
def weight_is_given_other_data(way: Way, device: str) -> list[Tensor]:
    norm = nn.LayerNorm(WIDTH).to(device)
    x = seeded(device, 32, WIDTH, grad=True)
    with way:
        loss = norm(x).square().sum()
    way.stats()
    norm.weight.data = seeded(device, WIDTH, seed=3)
    loss.backward()
    return [loss.detach(), x.grad, *gradients(norm)]


@case
def leaf_with_a_gradient_is_given_other_data(way: Way, device: str) -> list[Tensor]:
    x, a = seeded(device, WIDTH, grad=True), seeded(device, WIDTH, seed=2, grad=True)
    with way:
        loss = (x * a).sum()
    way.stats()
    a.data = torch.full((WIDTH,), 3.0, device=device)
    loss.backward()
    return [loss.detach(), x.grad, a.grad]


@case
def intermediate_is_given_other_data(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, WIDTH, grad=True)
    with way:
        h = x * 2
        loss = (x * h).sum()
    way.stats()
    h.data = torch.full((WIDTH,), 3.0, device=device)
    loss.backward()
    return [loss.detach(), x.grad]


@case
def an_operations_own_output_is_given_other_data(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, WIDTH, grad=True)
    with way:
        h = x.exp()
    way.stats()
    h.data = torch.full((WIDTH,), 3.0, device=device)
    h.sum().backward()
    return [x.grad]


@case
def leaf_is_set_to_other_memory(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, WIDTH, grad=True)
    a = torch.ones(WIDTH, device=device)
    with way:
        loss = (x * a).sum()
    way.stats()
    a.data.set_(torch.full((WIDTH,), 7.0, device=device))
    loss.backward()
    return [loss.detach(), x.grad]


def test_emptied_weights_free_their_memory(device: str, client: storm.Client) -> None:
    """As ZeRO-3 does: gathered for the forward, given up, gathered again for the backward."""

    def run(way: Way, device: str) -> list[Tensor]:
        gathered = seeded(device, 64, 64)
        weight = nn.Parameter(gathered.clone())
        x = seeded(device, 32, 64, seed=2, grad=True)
        with way:
            loss = (x @ weight).square().sum()  # F.linear saves a view, which keeps the memory
        memory = StorageWeakRef(weight.untyped_storage())
        weight.data = torch.empty(0, device=device)
        way.stats()
        assert memory.expired()
        weight.data = gathered.clone()
        loss.backward()
        return [loss.detach(), x.grad, weight.grad]

    assert_as_without(run, device, client)


# --- what custom Functions may do with what they saved --------------------------------------


class OverlappingSaves(torch.autograd.Function):
    """Saves a result and a part of it, and changes the part in the backward pass."""

    @staticmethod
    def forward(ctx: object, y: Tensor) -> Tensor:
        ctx.save_for_backward(y[:100], y)
        return y.sum()

    @staticmethod
    def backward(ctx: object, slope: Tensor) -> Tensor:
        part, y = ctx.saved_tensors
        part.data.mul_(2)
        return y * slope


class AbsoluteOffset(torch.autograd.Function):
    """Uses the storage offset that its narrow view had in the forward pass."""

    @staticmethod
    def forward(ctx: object, y: Tensor) -> Tensor:
        view = y[500:700]
        ctx.save_for_backward(view)
        ctx.offset = view.storage_offset()
        ctx.before, ctx.after = 500, y.numel() - 700
        return y.sum()

    @staticmethod
    def backward(ctx: object, slope: Tensor) -> Tensor:
        (view,) = ctx.saved_tensors
        middle = view.as_strided((200,), (1,), ctx.offset) * slope
        return F.pad(middle, (ctx.before, ctx.after))


def through(function: type[torch.autograd.Function], way: Way, device: str) -> list[Tensor]:
    x = torch.arange(10000.0, device=device).remainder(40).requires_grad_()
    with way:
        loss = function.apply(x * 3)
    return ended(way, loss, x)


@case
def overlapping_saves(way: Way, device: str) -> list[Tensor]:
    return through(OverlappingSaves, way, device)


@case
def absolute_storage_offset(way: Way, device: str) -> list[Tensor]:
    return through(AbsoluteOffset, way, device)


# --- modes of the backward pass and of differentiation --------------------------------------


@case
def backward_in_inference_mode(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, WIDTH, grad=True)
    with way:
        loss = (x.exp() * (x * 2)).sum()
    way.stats()
    with torch.inference_mode():
        loss.backward()
    return [loss.detach(), x.grad]


@case
def dual_tensors(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, WIDTH, grad=True)
    with way, forward_ad.dual_level():
        dual = forward_ad.make_dual(x * 1, torch.full_like(x, 2))
        primal, tangent = forward_ad.unpack_dual((dual * dual).exp() + F.relu(dual).sum() * dual)
        loss = (primal * tangent).sum()
        del dual, primal, tangent
        return ended(way, loss, x)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_identical(name: str, device: str, client: storm.Client) -> None:
    assert_as_without(CASES[name], device, client)


# --- what may leave still leaves ------------------------------------------------------------


class _Rows(torch.autograd.Function):
    """As libraries of kernels write theirs: views are saved, and one of new memory returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.view(-1)
        made = torch.empty_like(rows)
        made.copy_(rows)
        ctx.save_for_backward(rows)
        return made.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        return grad + 0 * rows.view(grad.shape)


def test_views_that_a_custom_function_saves_are_results(device: str, client: storm.Client) -> None:
    """They need a gradient without having a node, as leaves do; what they lie in is a result."""
    x = seeded(device, 64, WIDTH, grad=True)
    offload = client.offload(min_bytes=1)
    with offload:
        held, made = (h := x * 2), _Rows.apply(h)
        loss = made.sin().sum()
    stats = offload.stats()
    assert stats.offloaded_bytes == held.nbytes + made.nbytes
    assert not stats.skipped, stats.skipped
    loss.backward()


def test_a_result_that_is_held_leaves_at_the_end_of_its_block(
    device: str, client: storm.Client
) -> None:
    x = seeded(device, 64, WIDTH, grad=True)
    offload = client.offload(min_bytes=1)
    with offload:
        h = x.exp()
        loss = (h * 2).sum()
    assert offload.stats().offloaded_bytes == h.nbytes
    loss.backward()
