"""Random programs around a loss have PyTorch's bits in a block, or are refused.

A program is a list of operations on logits, on the float32 copy that `float()` returns, and on what
was made of either. From a certain step on the copy is deferred, if nothing but losses reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, NamedTuple

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from support.same_bits import same
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("new_losses")

PROGRAMS, SLOW_PROGRAMS = 40, 1000
ROWS, WIDTH, CLASSES = 160, 16, 64
STEPS = 7
IGNORED = -100


class Value(NamedTuple):
    """A tensor (rows, classes) with its targets."""

    tensor: Tensor
    target: Tensor

    def of(self, tensor: Tensor) -> Value:
        return self._replace(tensor=tensor)


class State:
    """What a program has computed in one step."""

    def __init__(self, logits: Value) -> None:
        self.values = [logits, logits.of(upcast(logits.tensor))]
        self.losses: list[Tensor] = []
        self.noted: list[Tensor] = []
        self.retained: list[Tensor] = []


def upcast(tensor: Tensor) -> Tensor:
    """Have all programs cast on the same line, so that the copies of each may be deferred."""
    return tensor.float()


Operation = Callable[[State, Value, Random], Any]
OPERATIONS: dict[Operation, float] = {}
"""How often each is drawn, in relation to others."""

HOOKS: set[Operation] = set()
WRITES: set[Operation] = set()
"""A program has hooks or writes: where a view that has a hook is written, PyTorch may crash."""


def drawn(weight: float, family: set[Operation] | None = None) -> Callable[[Operation], Operation]:
    """Have random programs draw an operation."""

    def note(operation: Operation) -> Operation:
        OPERATIONS[operation] = weight
        if family is not None:
            family.add(operation)
        return operation

    return note


def entropy(value: Value, random: Random) -> Tensor:
    """Return a loss with random options."""
    tensor, target = value
    classes = tensor.shape[1]
    smoothing = random.choice([0.0, 0.0, 0.0, 0.1])
    weight = torch.linspace(0.5, 2, classes).to(tensor.dtype) if random.random() < 0.1 else None
    loss = F.cross_entropy(
        tensor,
        target.clamp(max=classes - 1),
        weight,
        reduction=random.choice(["mean", "mean", "sum", "none"]),
        label_smoothing=smoothing,
    )
    return loss.sum().float() * random.uniform(0.9, 1.9)


READERS: list[Callable[[Tensor], Tensor]] = [
    lambda one: (one * (one.detach() * 3).cos()).sum() * 1e-3,
    lambda one: one.float().logsumexp(-1).square().mean(),
    lambda one: one.float().softmax(-1).square().sum(),
    lambda one: F.gelu(one).float().mean() * 30,
    lambda one: one[..., 3].float().square().sum() * 1e-2,
    lambda one: torch.cat([one, one * 2]).float().square().mean(),
    lambda one: torch.gather(one.log_softmax(-1), 1, one.argmax(1, keepdim=True)).float().mean(),
]
MOVES: list[Callable[[Tensor], Tensor]] = [
    lambda one: one.reshape(4, -1, one.shape[1]).view(-1, one.shape[1]),
    lambda one: one.transpose(0, 1).contiguous().transpose(0, 1),
    torch.clone,
    torch.Tensor.contiguous,
]
CHANGES: list[Callable[[Tensor], Tensor]] = [
    upcast,
    upcast,
    torch.Tensor.double,
    torch.Tensor.half,
    lambda one: one / 2.3,
    lambda one: torch.tanh(one) * 3,
    lambda one: torch.where(one > 0, one, one * 0.5),
]
IN_PLACE: list[Callable[[Tensor], Any]] = [
    lambda one: one.mul_(0.75),
    lambda one: one.__setitem__(slice(2, 9), 0.5),
    lambda one: one[3:7].mul_(0.5),
    lambda one: one.masked_fill_(torch.arange(one.shape[1]) < 3, -1e4),
    torch.no_grad()(lambda one: one.div_(1.7)),
]


class Saving(torch.autograd.Function):
    """Reads its input in both passes."""

    @staticmethod
    def forward(ctx: Any, one: Tensor) -> Tensor:
        ctx.save_for_backward(one)
        return one.float().sum() * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (one,) = ctx.saved_tensors
        return (gradient * (one.float() * 3).cos() * 1.7e-3).to(one.dtype)


@drawn(8)
def loss(state: State, value: Value, random: Random) -> None:
    state.losses.append(entropy(value, random))


@drawn(1)
def loss_of_parts(state: State, value: Value, random: Random) -> None:
    parts = zip(value.tensor.split(50), value.target.split(50), strict=True)
    state.losses += [entropy(Value(*part), random) for part in parts]


@drawn(1)
def loss_of_samples(state: State, value: Value, random: Random) -> None:
    rows = len(value.tensor) // 4 * 4
    tensor = value.tensor[:rows].reshape(4, -1, value.tensor.shape[1]).transpose(1, 2)
    target = value.target[:rows].clamp(max=value.tensor.shape[1] - 1).view(4, -1)
    state.losses.append(F.cross_entropy(tensor, target).float())


@drawn(1)
def checkpointed(state: State, value: Value, random: Random) -> None:
    reader, reentrant = random.choice(READERS), random.random() < 0.5

    def both(one: Tensor) -> Tensor:
        copied = upcast(one)
        return F.cross_entropy(copied, value.target.clamp(max=one.shape[1] - 1)) + reader(copied)

    state.losses.append(checkpoint(both, value.tensor, use_reentrant=reentrant))


@drawn(1)
def under_autocast(state: State, value: Value, random: Random) -> None:
    with torch.autocast("cpu", random.choice([torch.bfloat16, torch.float16])):
        state.losses.append(entropy(value, random))


@drawn(6)
def read(state: State, value: Value, random: Random) -> None:
    state.losses.append(random.choice(READERS)(value.tensor).float())


@drawn(1.5)
def read_without_gradient(state: State, value: Value, random: Random) -> None:
    with torch.no_grad():
        state.noted += [value.tensor.argmax(-1), entropy(value, random)]


@drawn(1)
def read_by_custom_function(state: State, value: Value, random: Random) -> None:
    state.losses.append(Saving.apply(value.tensor))  # type: ignore[no-untyped-call]


@drawn(3)
def part(state: State, value: Value, random: Random) -> None:
    begin = random.randrange(20)
    rows, columns = slice(begin, begin + 60), slice(None, -random.randrange(1, 4))
    state.values.append(Value(value.tensor[rows], value.target[rows]))
    state.values.append(value.of(value.tensor[:, columns]))


@drawn(4)
def move(state: State, value: Value, random: Random) -> None:
    state.values.append(value.of(random.choice(MOVES)(value.tensor)))


@drawn(5)
def change(state: State, value: Value, random: Random) -> None:
    state.values.append(value.of(random.choice(CHANGES)(value.tensor)))


@drawn(1)
def gradient(state: State, value: Value, random: Random) -> None:
    if state.losses:
        (found,) = torch.autograd.grad(
            state.losses[-1],
            value.tensor,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        state.noted.append(found)


@drawn(1)
def drop(state: State, value: Value, random: Random) -> None:
    if len(state.values) > 2:
        del state.values[random.randrange(len(state.values))]


@drawn(3, WRITES)
def write(state: State, value: Value, random: Random) -> None:
    random.choice(IN_PLACE)(value.tensor)


@drawn(2, HOOKS)
def hook(state: State, value: Value, random: Random) -> None:
    hooks = [lambda one: one * 1.25, state.noted.append, lambda one: one.clamp(-1e-3, 1e-3)]
    value.tensor.register_hook(random.choice(hooks))


@drawn(1, HOOKS)
def retain(state: State, value: Value, random: Random) -> None:
    value.tensor.retain_grad()
    state.retained.append(value.tensor)


Program = list[tuple[Operation, int]]
"""Each operation with a seed of its own."""


def program(random: Random) -> Program:
    left_out = random.choice([HOOKS, WRITES])
    weights = {one: weight for one, weight in OPERATIONS.items() if one not in left_out}
    chosen = random.choices(list(weights), list(weights.values()), k=random.randint(2, 12))
    return [(one, random.randrange(1 << 30)) for one in chosen]


def interpret(state: State, operations: Program) -> Tensor:
    """Run a program's operations and return the loss of a step."""
    for operation, seed in operations:
        random = Random(seed)
        operation(state, random.choice(state.values), random)
    return sum(
        (one for one in state.losses if one.requires_grad), state.values[0].tensor.float().sum() * 0
    )


def outcome(seed: int, block: AbstractContextManager[Any]) -> tuple[list[Tensor], Exception | None]:
    """Run a program; return what its whole steps have computed, and the error that ended it."""
    random, computed = Random(seed), list[Tensor]()
    dtype = random.choice([torch.float16, torch.bfloat16, torch.float32])
    operations, others = program(random), program(random)
    first = random.choice([0, 3, 4])  # before it steps compute a loss alone
    torch.manual_seed(seed)
    weight = (torch.randn(WIDTH, CLASSES) * 0.3).to(dtype).requires_grad_()
    for number in range(STEPS):
        target = torch.randint(CLASSES, (ROWS,))
        target[::7] = IGNORED
        try:
            with block:
                state = State(Value(torch.randn(ROWS, WIDTH).to(dtype) @ weight, target))
                if number < first:
                    total = F.cross_entropy(state.values[1].tensor, target)
                else:
                    total = interpret(state, operations if number % 3 else others)
                state.values.clear()
            (found,) = torch.autograd.grad(total, weight)
        except (RuntimeError, storm.ActivationLost) as error:
            torch.ones((), requires_grad=True).backward()  # PyTorch keeps what failed until then
            return computed, error
        kept = [one.grad for one in state.retained if one.grad is not None]
        computed += [one.detach() for one in (total, found, *state.noted, *kept)]
    return computed, None


@pytest.mark.parametrize(
    "seed",
    [
        *range(PROGRAMS),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(PROGRAMS, SLOW_PROGRAMS)),
    ],
)
def test_a_random_program(seed: int, client: storm.Client) -> None:
    expected, error = outcome(seed, nullcontext())
    least, budget = [(1024, "least"), (1024, 0.5), (1 << 30, "least")][seed % 3]
    found, refusal = outcome(seed, client.offload(min_bytes=least, budget=budget))
    assert all(map(same, found, expected))
    if error is not None:
        assert refusal is not None
    elif refusal is None:
        assert len(found) == len(expected)
    else:
        said = " ".join([str(refusal), *getattr(refusal, "__notes__", ())])
        assert 'loss="plain"' in said or "replay=False" in said, said
