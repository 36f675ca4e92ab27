"""Random programs of views, in-place changes and operations that save, each named by its seed.

`run` gives programs that PyTorch accepts and whose every change it counts. `run_freely` adds what
it does not count, what it refuses, and what else may happen to saved memory: writes by `.data`,
NumPy, DLPack and collectives, siblings of `unsafe_chunk`, other data for a tensor, operations that
fill what they saved, custom Functions, checkpoints, and values that are dropped at any moment.

One thing is never done, since offload cannot notice it: to change a result without a version after
its block, and to let go of it before the backward pass. What is given other data (`x.data = other`)
lives until then, too.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from random import Random
from typing import Any

import storm_client as storm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.comparing import Plain, Way, assert_same, outcome
from support.training import Context, seeded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["MAKING_GRADLESS", "compare_freely", "process_group", "run", "run_freely"]

SIDE = 24
STEPS = 30
FREE_STEPS = 24
GROUP_SECONDS = 60.0
"""How long a collective waits for the other process."""


def run(seed: int, device: str, context: Context) -> list[Tensor]:
    """Run the program of a seed; some intermediate results live to the end, others do not."""
    random = Random(seed)
    leaves = [seeded(device, SIDE, SIDE, seed=seed + i, grad=True) for i in range(2)]
    with context():
        values = [leaf * 1.5 for leaf in leaves]
        for _ in range(STEPS):
            step(random, values)
            if len(values) > 5:
                del values[random.randrange(len(values))]
        loss = torch.stack([value.sum() for value in values]).sin().sum()
    if random.random() < 0.5:
        values.clear()
    if random.random() < 0.3:
        loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def step(random: Random, values: list[Tensor]) -> None:
    """Add one value made of the others, or change one in place before anything saves it."""
    x, y = random.choice(values), random.choice(values)
    kind = random.randrange(9)
    if kind == 0:
        values.append((x * y).tanh())
    elif kind == 1:
        values.append(x.t())
    elif kind == 2:
        values.append((x @ y).mul(0.1).sin())
    elif kind == 3:
        fresh = x.cos()
        fresh = fresh + 0.25
        values.append(fresh.relu_())
    elif kind == 4:
        cut = random.randrange(1, SIDE)
        top, bottom = x[:cut], y[cut:]
        values.append(torch.cat([top * top, bottom.exp().clamp(max=3)]))
    elif kind == 5:
        row = x[random.randrange(SIDE)]
        values.append(row.expand(SIDE, SIDE) * y)
    elif kind == 6:
        halves = x.reshape(SIDE // 2, 2, SIDE).unbind(1)
        values.append(torch.cat([halves[0] * halves[1], halves[1].sigmoid()]))
    elif kind == 7:
        values.append(x.flip(0).where(y > 0, y * y))
    else:
        values.append(x.as_strided((SIDE, SIDE), x.stride(), x.storage_offset()).square().tanh())


# --- programs with changes that are not counted ---------------------------------------------


def compare_freely(
    seeds: range,
    device: str,
    client: storm.Client,
    *,
    steps: int = 2,
    forward: Sequence[Callable[[_Program], None]] = (),
) -> None:
    """Run the programs of some seeds without offload and `steps` times with it.

    Bits or errors agree.
    """
    for seed in seeds:
        program = partial(run_freely, seed, forward=forward)
        expected = outcome(program, Plain(), device)
        offload = client.offload(min_bytes=1, codec="raw" if seed % 2 else "ancf")
        for attempt in range(steps):
            try:
                assert_same(outcome(program, offload, device), expected)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, attempt {attempt}: {error}") from error


@contextmanager
def process_group(store: dist.Store, rank: int = 0, size: int = 1) -> Iterator[None]:
    """Let the programs' collectives be collectives."""
    import torch._dynamo  # noqa: F401 - checkpoints do, and what it imports keeps a group for good

    wait = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_freely(
    seed: int, way: Way, device: str, *, forward: Sequence[Callable[[_Program], None]] = ()
) -> list[Tensor]:
    """Run the program of a seed, whose forward pass consists of steps of FORWARD or `forward`.

    Raises:
        RuntimeError: PyTorch refuses the program, in the forward or in the backward pass.
    """
    program = _Program(seed, way, device, forward or FORWARD)
    try:
        return program.run()
    except RuntimeError:
        program.break_cycles()
        raise


class _Program:
    """What a program has made, and what it may do next.

    `values` are results of operations, `buffers` plain memory; what is `kept` lives to the end.
    """

    def __init__(
        self, seed: int, way: Way, device: str, forward: Sequence[Callable[[_Program], None]]
    ) -> None:
        torch.manual_seed(seed)
        self.forward = forward
        self.random = Random(seed)
        self.way = way
        self.device = device
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.numbers = count(1000 * (2 * seed + rank))
        self.leaves = [self.fresh().requires_grad_() for _ in range(2)]
        self.buffers = [self.fresh() for _ in range(2)]
        self.values: list[Tensor] = []
        self.terms: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.joined: list[weakref.ref[Tensor]] = []
        """Tensors that became part of a graph in place, perhaps of one that has saved them."""
        self.of_ended_blocks: set[int] = set()
        """Storages of results that were held when their block ended: they have been sent."""

    def run(self) -> list[Tensor]:
        for block in range(self.random.choice([1, 1, 2])):
            with self.way:
                self.values.append(self.leaves[block % 2] * 1.5)
                self.do(self.random.randrange(8, FREE_STEPS), self.forward)
                terms = [*self.terms, *(value.sum() for value in self.values)]
                loss = torch.stack([term.reshape(()) for term in terms]).sin().sum()
                self.terms = [loss]
            self.of_ended_blocks |= {_storage(value) for value in self.values}
            self.do(self.random.randrange(6), BETWEEN)
        self.terms.clear()
        del terms
        if self.random.random() < 0.5:
            self.values.clear()
            self.buffers.clear()
        if self.random.random() < 0.3:
            loss.backward(retain_graph=True)
            self.do(self.random.randrange(3), BETWEEN)
        loss.backward()
        return [loss.detach(), *(leaf.grad for leaf in self.leaves if leaf.grad is not None)]

    def do(self, steps: int, table: Sequence[Callable[[_Program], None]]) -> None:
        for _ in range(steps):
            self.random.choice(table)(self)
            if self.random.random() < 0.4:
                drop(self)

    def break_cycles(self) -> None:
        """Free the graph of a failed backward pass, which PyTorch leaks if it has saved its end."""
        for reference in self.joined:
            tensor = reference()
            if tensor is not None:
                tensor.detach_()

    # --- what the steps are made of

    def fresh(self) -> Tensor:
        return seeded(self.device, SIDE, SIDE, seed=next(self.numbers))

    def value(self) -> Tensor:
        if not self.values:
            self.values.append(self.leaves[0].sin())
        return self.random.choice(self.values)

    def buffer(self) -> Tensor:
        if not self.buffers:
            self.buffers.append(self.fresh())
        return self.random.choice(self.buffers)

    def write(self, target: Tensor) -> None:
        """Change rows of `target`, or all of it, in a way that PyTorch does not count."""
        if _storage(target) in self.of_ended_blocks:
            self.kept.append(target.detach())  # its memory, whatever data it is given
        rows = target.data
        if self.random.random() < 0.7:
            rows = rows[self.random.randrange(rows.shape[0])]
        source = self.fresh().flatten()[: rows.numel()].reshape(rows.shape)
        self.random.choice(WRITES)(rows, source)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# --- writes that are not counted: into `rows`, which shares memory and no version


def write_data(rows: Tensor, source: Tensor) -> None:
    rows.copy_(source)


def write_through_dlpack(rows: Tensor, source: Tensor) -> None:
    torch.from_dlpack(rows).copy_(source)


def write_numpy(rows: Tensor, source: Tensor) -> None:
    if rows.is_cuda:
        return write_data(rows, source)
    rows.numpy()[...] = source.numpy()
    return None


def write_by_all_to_all(rows: Tensor, source: Tensor) -> None:
    if (
        not dist.is_initialized()
        or not rows.is_contiguous()
        or rows.shape[0] % dist.get_world_size()
    ):
        return write_data(rows, source)
    dist.all_to_all_single(rows, source)
    return None


def write_by_scatter(rows: Tensor, source: Tensor) -> None:
    if not dist.is_initialized() or not rows.is_contiguous():
        return write_data(rows, source)
    is_first = dist.get_rank() == 0
    dist.scatter(
        rows, [source * i for i in range(1, dist.get_world_size() + 1)] if is_first else None
    )
    return None


def write_by_all_reduce(rows: Tensor, source: Tensor) -> None:
    rows.copy_(source)
    if dist.is_initialized() and rows.is_contiguous():
        dist.all_reduce(rows)


WRITES = [
    write_data,
    write_through_dlpack,
    write_numpy,
    write_by_all_to_all,
    write_by_scatter,
    write_by_all_reduce,
]


# --- steps of a forward pass


def lawful(program: _Program) -> None:
    program.value()
    step(program.random, program.values)


def save_a_buffer(program: _Program) -> None:
    program.values.append((program.value() * program.buffer()).tanh())


def save_a_leaf(program: _Program) -> None:
    program.values.append((program.random.choice(program.leaves) * program.value()).tanh())


def save_rows_written_in_turn(program: _Program) -> None:
    """Into a buffer or a result; each row is written, then saved."""
    target = program.buffer() if program.random.random() < 0.6 else program.value()
    x = program.value()
    for _ in range(program.random.randrange(1, 4)):
        program.write(target)
        cut = program.random.randrange(SIDE - 1)
        rows = slice(cut, program.random.randrange(cut + 1, SIDE))
        program.terms.append((x[rows] * target[rows]).mean())


def split_unsafely(program: _Program) -> None:
    """Parts that share memory and count their changes each on its own."""
    whole = program.value() * 1.25
    if program.random.random() < 0.5:
        parts = list(whole.unsafe_chunk(program.random.choice([2, 3, 4])))
    else:
        parts = list(whole.unsafe_split(program.random.choice([5, 8, 12])))
    del whole
    made = []
    for part in parts:
        change = program.random.choice([Tensor.sigmoid_, Tensor.tanh_, Tensor.relu_, Tensor.sin_])
        changed = change(part) if program.random.random() < 0.8 else part
        made.append(changed * changed)
    del part, changed
    program.values.append(torch.cat(made))
    if program.random.random() < 0.3:
        program.terms.append(program.random.choice(parts).sum())


def fill_what_was_saved(program: _Program) -> None:
    x = program.value() * 1.1
    kind = program.random.randrange(3)
    if kind == 0:
        program.values.append(F.rrelu(x, training=True))
    elif kind == 1:
        program.values.append(F.rrelu(x, training=True, inplace=True))
    else:
        program.values.append(F.dropout(x.tanh(), 0.3))


def make_gradless(program: _Program) -> None:
    """Of plain memory, without a gradient; it is written to, saved and kept like that."""
    random = program.random
    a, b = program.buffer(), program.buffer()
    made: Tensor = random.choice(GRADLESS)(a, b)
    if random.random() < 0.2:
        made.add_(1)
    if random.random() < 0.15:
        program.write(made)
    if random.random() < 0.7:
        program.values.append((program.value() * made).tanh())
    if random.random() < 0.15:
        program.write(made)
    if random.random() < 0.5:
        program.buffers.append(made)
    if random.random() < 0.3:
        with torch.no_grad():
            doubled = made * 2
        program.values.append(program.value() * doubled)


GRADLESS: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.mul,
    lambda a, _: a.sigmoid(),
    lambda a, _: a[torch.arange(SIDE - 1, -1, -1, device=a.device)],
    lambda a, b: torch.cat([a, b])[:SIDE].clone(),
    lambda a, b: torch.cat([a[: SIDE // 2], b[SIDE // 2 :]]),
    lambda a, _: (a - a.mean()) / (a.std() + 1),
    lambda a, _: F.softmax(a, -1),
    torch.matmul,
    lambda a, _: F.dropout(a, 0.3),
    lambda a, _: F.layer_norm(a, (SIDE,)),
    lambda a, _: a.to(torch.float64).to(torch.float32),
    lambda a, b: torch.where(a > 0, a, b),
]


def join_a_graph(program: _Program) -> None:
    """In place: what was made without a gradient becomes part of a graph."""
    random, a = program.random, program.buffer()
    made = random.choice(BEFORE_A_GRAPH)(a)
    program.joined.append(weakref.ref(made))
    if random.random() < 0.3:
        program.values.append((program.value() * made).tanh())
    if random.random() < 0.3:
        made.mul_(2)
    value = program.value()
    kind = random.randrange(4)
    if kind == 0 or (kind == 1 and value.shape != made.shape):
        made.add_(value)
    elif kind == 1:
        made[3:7].add_(value[3:7])
    elif kind == 2:
        made.index_add_(0, torch.tensor([1, 1, 5], device=made.device), value[:3])
    else:
        made.copy_(value)
    program.values.append(made if random.random() < 0.5 else made.tanh())
    if random.random() < 0.3:
        made.sigmoid_()
    if random.random() < 0.2:
        program.write(made)


BEFORE_A_GRAPH: list[Callable[[Tensor], Tensor]] = [
    lambda a: a * 1.0,
    torch.sigmoid,
    torch.zeros_like,
    lambda a: a[torch.arange(SIDE, device=a.device)],
]


def write_without_a_version(program: _Program) -> None:
    program.write(program.buffer() if program.random.random() < 0.5 else program.value())


def write_with_a_version(program: _Program) -> None:
    """As may be refused, where the tensor was saved before."""
    if program.random.random() < 0.8:
        program.buffers.append(program.fresh())
        program.buffers[-1][1:3] = 2.0
    else:
        with torch.no_grad():
            program.buffer()[program.random.randrange(SIDE)] += 1.0


def give_other_data(program: _Program) -> None:
    kind = program.random.randrange(4)
    if kind == 3:
        tensor = program.random.choice(program.leaves)
    else:
        tensor = program.buffer() if kind else program.value()
    program.kept.append(tensor)
    tensor.data = program.fresh()


def set_to_other_memory(program: _Program) -> None:
    """Counted, and refused where the buffer was saved before."""
    if program.random.random() < 0.8:
        program.buffers.append(program.fresh())
        program.buffers[-1].set_(program.fresh())
    else:
        program.buffer().set_(program.fresh())


def lend_memory(program: _Program) -> None:
    """A buffer whose memory somebody else made, and keeps or gives up."""
    owner = program.fresh()
    if program.random.random() < 0.5:
        program.buffers.append(owner)
    alias = owner.detach()  # to lend `owner` itself would free the memory if it got other data
    lent = torch.from_dlpack(alias) if owner.is_cuda else torch.from_numpy(alias.numpy())
    program.buffers.append(lent)
    program.values.append((program.value() * lent).cos())


def apply_a_function(program: _Program) -> None:
    function = program.random.choice([Dirty, Overlapping, OverlappingCounted, Offsets, Composed])
    cut = program.random.randrange(1, SIDE - 1)
    program.values.append(function.apply(program.value() * 0.9, cut))


def checkpointed(program: _Program) -> None:
    x, buffer, way = program.value(), program.buffer(), program.way
    reentrant = program.random.random() < 0.5
    enters = reentrant and program.random.random() < 0.5  # otherwise it would take over

    def inner(x: Tensor) -> Tensor:
        hidden = (x * buffer).tanh()
        return F.dropout(hidden, 0.2) * hidden.t() + x

    def function(x: Tensor) -> Tensor:
        if not enters:
            return inner(x)
        with way:
            return inner(x)

    program.values.append(checkpoint(function, x, use_reentrant=reentrant))
    program.buffers.append(buffer)  # the recomputation reads it


def drop(program: _Program) -> None:
    """Let go of a value, whose sum may have been taken, or of a buffer."""
    if program.values and program.random.random() < 0.7:
        value = program.values.pop(program.random.randrange(len(program.values)))
        if program.random.random() < 0.5 and torch.is_grad_enabled():
            program.terms.append(value.mean())
    elif program.buffers:
        del program.buffers[program.random.randrange(len(program.buffers))]


def send(program: _Program) -> None:
    """Have what may leave be sent, as another block does, or statistics."""
    if program.random.random() < 0.5:
        program.way.stats()
    else:
        with program.way:
            pass


FORWARD = [
    *[lawful] * 6,
    save_a_buffer,
    save_a_buffer,
    save_a_leaf,
    save_rows_written_in_turn,
    save_rows_written_in_turn,
    split_unsafely,
    split_unsafely,
    fill_what_was_saved,
    write_without_a_version,
    write_without_a_version,
    write_with_a_version,
    give_other_data,
    set_to_other_memory,
    lend_memory,
    apply_a_function,
    apply_a_function,
    checkpointed,
    drop,
    send,
]

MAKING_GRADLESS = [*FORWARD, *[make_gradless] * 4, *[join_a_graph] * 5]

BETWEEN = [
    write_without_a_version,
    write_without_a_version,
    give_other_data,
    drop,
    drop,
    send,
    send,
]


# --- custom Functions


class Dirty(torch.autograd.Function):
    """Changes its input in place, and saves what it has become."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int) -> Tensor:
        x.exp_()
        x.clamp_(max=4)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return slope * x * (x < 4), None


class Overlapping(torch.autograd.Function):
    """Saves a part and the whole; its backward pass changes the part, uncounted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int) -> Tensor:
        ctx.save_for_backward(x[:cut], x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        part, whole = ctx.saved_tensors
        part.data.mul_(0.5)
        return slope * whole.cos(), None


class OverlappingCounted(torch.autograd.Function):
    """The same, counted: a second backward pass is refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int) -> Tensor:
        ctx.save_for_backward(x[cut:], x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        part, whole = ctx.saved_tensors
        part.mul_(0.5)
        return slope * whole.cos(), None


class Offsets(torch.autograd.Function):
    """Saves a narrow view, and uses the storage offset that it had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int) -> Tensor:
        row = x[cut]
        ctx.save_for_backward(row)
        ctx.offset = row.storage_offset()
        return x * row.mean()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        return slope * row.as_strided((SIDE, 1), (0, 1), ctx.offset), None


class Composed(torch.autograd.Function):
    """Several operations, whose results it saves; some are changed in between, counted or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int) -> Tensor:
        scale = x @ x.t() * 0.1
        if cut % 3 == 0:
            scale.data[:cut] = 0.5
        elif cut % 3 == 1:
            scale[cut:].sin_()
        gate = scale.sigmoid()
        ctx.save_for_backward(gate, scale[:cut])
        return x.mul(gate).add_(scale.mean())

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        gate, scale = ctx.saved_tensors
        return slope * gate + scale.mean(), None


# --- one of several processes ---------------------------------------------------------------


def main(address: str, device: str, store: str, rank: int, size: int, seeds: int) -> None:
    """Compare programs in one process of a group, with the daemon at an address."""
    with (
        storm.connect(address, embedded="never") as client,
        process_group(dist.FileStore(store, size), rank, size),
    ):
        compare_freely(range(seeds), device, client)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
