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
from torch.nn.utils import parameters_to_vector, vector_to_parameters
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


# --- recurrent layers split their gates by unsafe_chunk -------------------------------------


def recurrent(module: nn.Module, x: Tensor, way: Way) -> list[Tensor]:
    x.requires_grad_()
    with way:
        loss = module(x)[0].square().sum()
    way.stats()
    loss.backward()
    return [loss.detach(), *gradients(module), x.grad]


@case
def gru(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return recurrent(nn.GRU(64, 64, num_layers=2).to(device), seeded(device, 3, 64, 64), way)


@case
def gru_bidirectional(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.GRU(32, 32, bidirectional=True, batch_first=True).to(device)
    return recurrent(module, seeded(device, 64, 4, 32), way)


@case
def lstm_in_float64(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.LSTM(64, 64).double().to(device)
    return recurrent(module, seeded(device, 3, 64, 64).double(), way)


@case
def lstm_with_projections(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return recurrent(nn.LSTM(64, 64, proj_size=32).to(device), seeded(device, 3, 64, 64), way)


@case
def gru_cell(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    cell = nn.GRUCell(64, 64).to(device)
    x = seeded(device, 64, 64, grad=True)
    with way:
        hidden = None
        for _ in range(3):
            hidden = cell(x, hidden)
        loss = hidden.square().sum()
    del hidden
    way.stats()
    loss.backward()
    return [loss.detach(), *gradients(cell), x.grad]


@case
def lstm_cell(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    cell = nn.LSTMCell(64, 64).to(device)
    x = seeded(device, 64, 64, grad=True)
    with way:
        state = None
        for _ in range(3):
            state = cell(x, state)
        loss = state[0].square().sum() + state[1].sum()
    del state
    way.stats()
    loss.backward()
    return [loss.detach(), *gradients(cell), x.grad]


def packed(module: nn.Module, way: Way, device: str) -> list[Tensor]:
    x = seeded(device, 5, 64, 32, grad=True)
    lengths = torch.arange(64).remainder(5).add(1).sort(descending=True).values
    with way:
        loss = module(pack_padded_sequence(x, lengths))[0].data.square().sum()
    way.stats()
    loss.backward()
    return [loss.detach(), *gradients(module), x.grad]


@case
def lstm_of_packed_sequences(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return packed(nn.LSTM(32, 64).to(device), way, device)


@case
def gru_of_packed_sequences(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    return packed(nn.GRU(32, 64).to(device), way, device)


@case
def siblings_of_unsafe_chunk(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, 2 * WIDTH, grad=True)
    with way:
        loss = torch.zeros((), device=device)
        for part in (x * 2).unsafe_chunk(2):
            loss = loss + (part.mul_(3).sigmoid_() ** 2).sum()
    del part
    way.stats()
    loss.backward()
    return [loss.detach(), x.grad]


@case
def siblings_of_unsafe_split_that_live_on(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, 2 * WIDTH, grad=True)
    with way:
        parts = (x * 2).unsafe_split(WIDTH)
        loss = torch.zeros((), device=device)
        for part in parts:
            loss = loss + (part.sigmoid_() ** 2).sum()
    way.stats()
    loss.backward()
    return [loss.detach(), x.grad]


# --- operations that fill what they have saved ----------------------------------------------


def filled(function: Callable[[Tensor], Tensor], way: Way, device: str) -> list[Tensor]:
    x = seeded(device, 64, WIDTH, grad=True)
    torch.manual_seed(0)
    with way:
        loss = function(x * 1).square().sum()
    way.stats()
    loss.backward()
    return [loss.detach(), x.grad]


@case
def rrelu(way: Way, device: str) -> list[Tensor]:
    return filled(lambda x: F.rrelu(x, training=True), way, device)


@case
def rrelu_in_place(way: Way, device: str) -> list[Tensor]:
    return filled(lambda x: F.rrelu(x, training=True, inplace=True), way, device)


@case
def rrelu_twice_of_one_input(way: Way, device: str) -> list[Tensor]:
    module = nn.RReLU(0.1, 0.9)
    return filled(lambda x: module(x) * module(x), way, device)


# --- slices of one buffer, each written and then saved --------------------------------------


def write_data(rows: Tensor, i: int, value: Tensor) -> None:
    rows.data[i] = value


def write_detached(rows: Tensor, i: int, value: Tensor) -> None:
    rows.detach().data[i] = value


def write_through_dlpack(rows: Tensor, i: int, value: Tensor) -> None:
    torch.from_dlpack(rows.detach())[i] = value


def write_numpy(rows: Tensor, i: int, value: Tensor) -> None:
    rows.detach().numpy()[i] = value.numpy()


def all_to_all(rows: Tensor, i: int, value: Tensor) -> None:
    dist.all_to_all_single(rows.data[i], value)


def scatter(rows: Tensor, i: int, value: Tensor) -> None:
    dist.scatter(rows.data[i], [value])


def all_reduce(rows: Tensor, i: int, value: Tensor) -> None:
    rows.data[i] = value * 2
    dist.all_reduce(rows.data[i], op=dist.ReduceOp.AVG if rows.is_cuda else dist.ReduceOp.MAX)


WRITES = {
    write.__name__: write
    for write in (
        write_data,
        write_detached,
        write_through_dlpack,
        write_numpy,
        all_to_all,
        scatter,
        all_reduce,
    )
}

Write = Callable[[Tensor, int, Tensor], None]


@pytest.fixture
def write(request: pytest.FixtureRequest, device: str) -> Iterator[Write]:
    """A way to fill a row; collectives have a group of one process for the test."""
    name = request.param
    if name == "write_numpy" and device != "cpu":
        pytest.skip("NumPy reaches the host's memory alone")
    if name not in ("all_to_all", "scatter", "all_reduce"):
        yield WRITES[name]
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield WRITES[name]
    finally:
        dist.destroy_process_group()


each_write = pytest.mark.parametrize("write", WRITES, indirect=True)


@each_write
@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_rows_of_a_buffer_that_are_written_and_saved_in_turn(
    keeps: bool, write: Write, device: str, client: storm.Client
) -> None:
    def run(way: Way, device: str) -> list[Tensor]:
        weight = seeded(device, ROWS, WIDTH, grad=True)
        rows = torch.zeros(ROWS, WIDTH, device=device)
        with way:
            loss = torch.zeros((), device=device)
            for i in range(ROWS):
                write(rows, i, torch.full((WIDTH,), i + 1.0, device=device))
                loss = loss + (weight[i] * rows[i]).sum()
        if not keeps:
            del rows
        way.stats()
        loss.backward()
        return [loss.detach(), weight.grad]

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
        way.stats()
        loss.backward()
        return [loss.detach(), weight.grad]

    assert_as_without(run, device, client)


@each_write
def test_rows_of_a_result_that_are_written_and_saved_in_turn(
    write: Write, device: str, client: storm.Client
) -> None:
    def run(way: Way, device: str) -> list[Tensor]:
        x = seeded(device, ROWS, WIDTH, grad=True)
        with way:
            rows = x * 2
            loss = torch.zeros((), device=device)
            for i in range(ROWS):
                write(rows, i, torch.full((WIDTH,), i + 1.0, device=device))
                loss = loss + (x[i] * rows[i]).sum()
            del rows
        way.stats()
        loss.backward()
        return [loss.detach(), x.grad]

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


@case
def memory_that_dlpack_lent(way: Way, device: str) -> list[Tensor]:
    owner = torch.ones(WIDTH, device=device)
    x = seeded(device, WIDTH, grad=True)
    with way:
        loss = (x * torch.from_dlpack(owner)).sum()
    way.stats()
    owner.fill_(5)
    loss.backward()
    return [loss.detach(), x.grad]


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
    way.stats()
    loss.backward()
    return [loss.detach(), scale.grad]


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
def vector_to_parameters_before_the_backward(way: Way, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)
    x = seeded(device, 16, 32, grad=True)
    with way:
        loss = net(x).square().sum()
    way.stats()
    vector_to_parameters(parameters_to_vector(net.parameters()).detach() * 3, net.parameters())
    loss.backward()
    return [loss.detach(), x.grad, *gradients(net)]


@case
def plain_leaf_is_given_other_data(way: Way, device: str) -> list[Tensor]:
    x = seeded(device, WIDTH, grad=True)
    a = torch.ones(WIDTH, device=device)
    with way:
        loss = (x * a).sum()
    way.stats()
    a.data = torch.full((WIDTH,), 3.0, device=device)
    loss.backward()
    return [loss.detach(), x.grad]


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


class BytesAsQuantized(torch.autograd.Function):
    """Saves bytes under the type of quantized tensors."""

    @staticmethod
    def forward(ctx: object, y: Tensor) -> Tensor:
        ctx.save_for_backward(y.to(torch.int8).view(torch.uint8).view(torch.qint8))
        return y.sum()

    @staticmethod
    def backward(ctx: object, slope: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved.view(torch.uint8).float() * slope


def through(function: type[torch.autograd.Function], way: Way, device: str) -> list[Tensor]:
    x = torch.arange(10000.0, device=device).remainder(40).requires_grad_()
    with way:
        loss = function.apply(x * 3)
    way.stats()
    loss.backward()
    return [loss.detach(), x.grad]


@case
def overlapping_saves(way: Way, device: str) -> list[Tensor]:
    return through(OverlappingSaves, way, device)


@case
def absolute_storage_offset(way: Way, device: str) -> list[Tensor]:
    return through(AbsoluteOffset, way, device)


@case
def bytes_viewed_as_quantized(way: Way, device: str) -> list[Tensor]:
    return through(BytesAsQuantized, way, device)


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
        way.stats()
        loss.backward()
    return [loss.detach(), x.grad]


@case
def zero_tangents(way: Way, device: str) -> list[Tensor]:
    x, w = seeded(device, 32, 32, grad=True), seeded(device, 32, 32, seed=2, grad=True)
    with way, forward_ad.dual_level():
        dual = forward_ad.make_dual(x * 1, torch.full_like(x, 2))
        # w has no tangent: its products take a zero tensor in its place
        out = F.layer_norm(torch.addmm(w, dual, w), (32,), w[0], w[1])
        primal, tangent = forward_ad.unpack_dual(out)
        loss = (primal * tangent).sum()
        del dual, out, primal, tangent
        way.stats()
        loss.backward()
    return [loss.detach(), x.grad, w.grad]


@case
def func_jvp(way: Way, device: str) -> list[Tensor]:
    x, w = seeded(device, WIDTH), seeded(device, WIDTH, seed=2, grad=True)
    with way:
        value, tangent = torch.func.jvp(lambda z: (z * z * w).sin(), (x,), (x * 2,))
        loss = (value * tangent).sum()
    del value, tangent
    way.stats()
    loss.backward()
    return [loss.detach(), w.grad]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_identical(name: str, device: str, client: storm.Client) -> None:
    assert_as_without(CASES[name], device, client)


# --- what may leave still leaves ------------------------------------------------------------


def test_an_lstm_of_one_kernel_is_offloaded(device: str, client: storm.Client) -> None:
    torch.manual_seed(0)
    module = nn.LSTM(64, 128).to(device)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = module(seeded(device, 16, 32, 64))[0].square().sum()
    stats = offload.stats()
    states = 16 * 32 * 128 * 4  # each of them is saved at least once: gates, cells, outputs
    assert stats.offloaded_bytes >= 3 * states
    loss.backward()


def test_views_of_a_result_are_stored_once(device: str, client: storm.Client) -> None:
    x = seeded(device, 64, WIDTH, grad=True)
    offload = client.offload(min_bytes=1)
    with offload:
        h = x * 2
        loss = (h * h).sum() + (h[3:7] * h[3:7]).sum() + (h.t() @ h[:, :4]).tanh().sum()
        del h
    stats = offload.stats()
    assert x.nbytes <= stats.offloaded_bytes < 1.5 * x.nbytes
    assert stats.deduplicated_bytes >= 2 * x.nbytes
    loss.backward()


def test_an_input_shared_by_three_products_is_stored_once(
    device: str, client: storm.Client
) -> None:
    torch.manual_seed(0)
    heads = nn.ModuleList(nn.Linear(64, 4, bias=False) for _ in range(3)).to(device)
    x = seeded(device, 4096, 64, grad=True)
    offload = client.offload(heads, min_bytes=1)
    with offload:
        h = x * 2
        q, k, v = (head(h) for head in heads)
        loss = q.sum() + k.sum() + v.sum()
        del h, q, k, v
    stats = offload.stats()
    assert stats.offloaded_bytes == x.nbytes
    assert stats.deduplicated_bytes == 2 * x.nbytes
    loss.backward()


def test_the_masks_of_dropout_are_offloaded(device: str, client: storm.Client) -> None:
    x = seeded(device, 64, WIDTH, grad=True)
    offload = client.offload(min_bytes=1)
    with offload:
        loss = F.dropout(x * 2, 0.5).sum()
    stats = offload.stats()
    assert stats.offloaded_bytes >= x.numel()  # a byte an element at least
    assert not stats.skipped, stats.skipped
    loss.backward()


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
