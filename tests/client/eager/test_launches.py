"""Launches of Triton kernels: what custom functions make with them is recomputed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
from storm_client.errors import ActivationLost
from storm_client.hooks import StepHooks
from support import fake_triton
from support.fake_triton import JITFunction, jit
from support.following import PATHS, Followed, follow_by
from support.planning import replay_all
from support.training import assert_identical, seeded
from torch import Tensor

Context = Callable[[], AbstractContextManager[object]]
Forward = Callable[[Tensor, Tensor], Tensor]

ROWS, WIDTH = 16, 64
STEPS = 9


@jit("*fp32 *fp32 *fp32 *fp32 i32 fp32 constexpr", reads="x w", writes="y scale")
def norm(y: Any, x: Any, w: Any, scale: Any, n: int, eps: float, width: int) -> None:
    assert x.shape[-1] == n == width
    scale[:] = 1 / np.sqrt(np.square(x).mean(-1) + eps)
    y[:] = x * scale[:, None] * w


@jit("*fp32 *fp32 *fp32 i32", reads="a b", writes="c")
def gate(c: Any, a: Any, b: Any, n: int) -> None:
    assert a.shape[-1] == n
    c[:] = a / (1 + np.exp(-a)) * b


@jit("*fp32 *fp32 i32", reads="q angles", writes="q")
def turn(q: Any, angles: Any, n: int) -> None:
    assert q.shape[-1] == n
    q[:] = q * np.cos(angles) - np.roll(q, 1, -1) * np.sin(angles)


@jit("*fp32 *fp32 *fp32 i32", reads="q k angles", writes="q k")
def rope(q: Any, k: Any, angles: Any, n: int) -> None:
    turn.of(q, angles, n)
    turn.of(k, angles, n)


@jit("*fp32 *fp32 *fp32 i32", reads="q x", writes="made q")
def split(made: Any, q: Any, x: Any, n: int) -> None:
    made[:] = q * x
    q -= x


@jit("*fp32 *fp32 i32", reads="x", writes="y")
def put(y: Any, x: Any, n: int) -> None:
    """Write the rows from `n` on alone."""
    y[n:] = x[n:] + 1


class Normed(torch.autograd.Function):
    """As Liger's: of views of what it is given it makes what it returns a view of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        made, scale = torch.empty_like(rows), torch.empty(len(rows))
        norm[(len(rows),)](made, rows, w, scale, WIDTH, eps=1e-6, width=WIDTH)
        ctx.save_for_backward(rows, w, scale)
        return made.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, w, scale = ctx.saved_tensors
        given, x = grad.view(rows.shape), rows * scale[:, None]
        back = given * w
        back = scale[:, None] * (back - x * (back * x).mean(-1, keepdim=True))
        return back.view(grad.shape), (given * x).sum(0)


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        made = a.new_empty(a.shape)
        gate[lambda meta: (meta["n"], 2)](made, a, b, n=WIDTH)
        ctx.save_for_backward(a, b)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        one = torch.sigmoid(a)
        return grad * b * one * (1 + a * (1 - one)), grad * a * one


class Turned(torch.autograd.Function):
    """In place, which no version counts, and maybe by an operation behind the kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
        turn[(1,)](q, angles, WIDTH)
        if factor != 1.0:
            q.mul_(factor)
        ctx.save_for_backward(angles)
        ctx.factor = factor
        return q.view(q.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (angles,) = ctx.saved_tensors
        return ctx.factor * unturned(grad, angles), None, None


class Roped(torch.autograd.Function):
    """As Liger's: in place on both, of which it returns views."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        rope[(1,)](q.t().t(), k.t().t(), angles, WIDTH)
        ctx.save_for_backward(angles)
        return q.t().t(), k.t().t()

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, None]:
        (angles,) = ctx.saved_tensors
        return unturned(q, angles), unturned(k, angles), None


class Split(torch.autograd.Function):
    """Of new memory, and in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        made = torch.empty_like(q)
        split[(1,)](made, q, x, WIDTH)
        ctx.save_for_backward(x)
        return made, q.view(q.shape)

    @staticmethod
    def backward(ctx: Any, made: Tensor, q: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return made * x + q, None


def unturned(grad: Tensor, angles: Tensor) -> Tensor:
    return grad * angles.cos() - (grad * angles.sin()).roll(-1, -1)


def put_into(make: Callable[[Tensor], Tensor], *begins: int) -> Forward:
    """Return a forward pass by a function that fills what `make` returns from some rows on."""

    class Put(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            made = make(x)
            for begin in begins:
                put[(1,)](made, x, begin)
            return made

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return Put.apply(x @ w)  # type: ignore[no-any-return]

    return forward


def a_layer(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(2):
        y = Normed.apply(x @ w, w[0])
        x = x + Gated.apply(y @ w, y @ w.t())
    return x.square()


def turned(q: Tensor) -> Tensor:
    return Turned.apply(q, seeded("cpu", *q.shape, seed=7))  # type: ignore[no-any-return]


def roped(x: Tensor, w: Tensor) -> Tensor:
    q, k = Roped.apply(x @ w, x @ w.t(), seeded("cpu", *x.shape, seed=7))
    return q * k  # type: ignore[no-any-return]


def read_before(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    before = torch.sin(y + 1)  # saves what is made of it
    return (turned(y) * before).square()


def saved_before(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    before = y.square()  # its backward pass reads what is there then
    return before + turned(y).square()


def roped_layer(x: Tensor, w: Tensor) -> Tensor:
    return a_layer(roped(x, w), w)


def several(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        y = torch.tanh(x @ w)
        x = y + roped(y, w).tanh() + turned(turned(y + 1)).square()
    return x.square()


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", fake_triton.MODULE)


@pytest.fixture(params=PATHS)
def followed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """Have the compiled module be there on both paths: only that sees what is new."""
    followed = follow_by("compiled", monkeypatch)
    if request.param == "python":
        monkeypatch.setattr(StepHooks, "_native_counts", lambda *_: None)
        followed.may_be_compiled = False
    return followed


def step(context: Context, forward: Forward, rows: int = ROWS) -> list[Tensor]:
    x, w = seeded("cpu", rows, WIDTH, seed=1), seeded("cpu", WIDTH, WIDTH, seed=2, grad=True)
    with context():
        loss = forward(x, w).mean()
    loss.backward()
    return [loss.detach(), w.grad]


def trained(client: storm.Client, forward: Forward, **options: Any) -> storm.Offload:
    """Train for some steps, and compare each with one without offload."""
    offload = client.offload(min_bytes=256, **options)
    expected = step(nullcontext, forward)
    for _ in range(STEPS):
        assert_identical(step(lambda: offload, forward), expected)
    return offload


def decisions(offload: storm.Offload, operation: str) -> set[str]:
    return {row.decision for row in offload.plan.rows if row.operation == operation}


def test_what_kernels_make_is_recomputed(
    client: storm.Client, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    run = JITFunction.run
    offload = trained(client, a_layer)
    assert decisions(offload, "norm") == decisions(offload, "gate") == {"replay"}, offload.plan
    assert followed[-1] == followed.may_be_compiled
    assert not followed.left
    assert JITFunction.run is run
    before = gate.compiled.launches
    step(lambda: offload, a_layer)
    assert gate.compiled.launches > before + 2  # of the forward pass


@pytest.mark.parametrize(
    ("make", "begins"),
    [
        (torch.zeros_like, (4,)),
        (lambda x: torch.empty_like(x).zero_(), (4,)),
        (lambda x: torch.empty(2, *x.shape)[0], (0,)),
    ],
    ids=["zeros", "zeroed", "a part"],
)
def test_what_was_in_memory_before_is_not_made_again(
    make: Callable[[Tensor], Tensor],
    begins: tuple[int, ...],
    client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    put_some = put_into(make, *begins)
    offload = trained(client, lambda x, w: put_some(x, w).square())
    assert not decisions(offload, "put")


@pytest.mark.parametrize(
    ("forward", "operation"),
    [
        (lambda x, w: turned(x @ w).square(), "turn"),
        (lambda x, w: turned(turned(x @ w)).square(), "turn"),
        (lambda x, w: Turned.apply(x @ w, seeded("cpu", *x.shape), 2.0).square(), "mul_"),
        (lambda x, w: turned((x @ w).mul_(2)).square(), "turn"),
        (lambda x, w: turned(Normed.apply(x @ w, w[0])).square(), "turn"),
        (read_before, "turn"),
        (roped, "rope"),
        (lambda x, w: Roped.apply(x @ w, x @ w, seeded("cpu", *x.shape))[1].square(), "rope"),
        (lambda x, w: torch.mul(*Split.apply(x @ w, x)), "split"),
        (put_into(torch.empty_like, 4, 0), "put"),
        (several, "rope"),
    ],
    ids=[
        "one",
        "twice",
        "changed",
        "again",
        "fresh",
        "read",
        "two",
        "half",
        "mixed",
        "put",
        "many",
    ],
)
def test_what_is_written_in_place_is_recomputed_by_both_operations(
    forward: Forward,
    operation: str,
    client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    offload = trained(client, lambda x, w: a_layer(forward(x, w), w))
    assert decisions(offload, operation) == {"replay"}, offload.plan
    assert "other bits" not in str(offload.plan)
    assert followed[-1] == followed.may_be_compiled
    assert not followed.left


def turned_parameter(x: Tensor, w: Tensor) -> Tensor:
    turn[(1,)](w.detach(), seeded("cpu", *w.shape), WIDTH)
    return x @ w


def turned_input(x: Tensor, w: Tensor) -> Tensor:
    turn[(1,)](x, seeded("cpu", *x.shape), WIDTH)
    return (x @ w).square()


def roped_together(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    q, k = Roped.apply(y, y, seeded("cpu", *y.shape))
    return q * k  # type: ignore[no-any-return]


def roped_with_given(x: Tensor, w: Tensor) -> Tensor:
    given = seeded("cpu", *x.shape, seed=3)
    return Roped.apply(x @ w, given, seeded("cpu", *x.shape))[0].square()  # type: ignore[no-any-return]


def split_given(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).tanh()
    made, _ = Split.apply(seeded("cpu", *x.shape, seed=3), x)
    return (y * made).square()


@pytest.mark.parametrize(
    "forward",
    [
        turned_parameter,
        turned_input,
        saved_before,
        roped_together,
        roped_with_given,
        split_given,
        lambda x, w: turned((x @ w)[:4]).square(),
        lambda x, w: turned(turned((x @ w)[:4])).square(),
    ],
    ids=["parameter", "input", "saved", "same", "given", "mixed", "part", "parts"],
)
def test_what_is_written_in_place_to_other_memory_is_another_value(
    forward: Forward,
    client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    offload = trained(client, lambda x, w: a_layer(forward(x, w), w))
    for kernel in ("turn", "rope", "split"):
        assert not decisions(offload, kernel)
    assert followed[-1] == followed.may_be_compiled
    assert not followed.left


@pytest.mark.parametrize(
    ("options", "is_free"),
    [
        ({"verify": "always"}, True),
        ({"budget": 0.5}, True),
        ({"budget": "least"}, False),
        ({"replay": False}, False),
    ],
    ids=["verified", "half", "least", "without"],
)
def test_what_is_written_in_place_has_the_same_bits_by_any_plan(
    options: dict[str, Any],
    is_free: bool,
    client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_free:
        replay_all(monkeypatch)
    trained(client, several, **options)


def test_batches_of_any_length_are_written_to_in_place(
    client: storm.Client, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)
    offload = client.offload(min_bytes=256)
    for rows in (16, 24, 8, 16, 12, 20, 24, 16, 10, 22):
        expected = step(nullcontext, several, rows)
        assert_identical(step(lambda: offload, several, rows), expected)
    assert decisions(offload, "rope") == {"replay"}, offload.plan
    assert any(followed) == followed.may_be_compiled
    assert not followed.left


def test_steps_that_write_in_place_elsewhere_have_their_own_bits(
    client: storm.Client, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is known to be done, others may do it to more, to less, or to what is saved."""
    replay_all(monkeypatch)

    def more(x: Tensor, w: Tensor) -> Tensor:
        return a_layer(turned(turned(roped(x, w) + 1)), w)

    def saved(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        before = y.square()
        return a_layer(Roped.apply(y, x @ w.t(), seeded("cpu", *x.shape))[1] * before, w)

    offload, less = trained(client, roped_layer), a_layer
    for one in (more, roped_layer, less, saved, roped_layer, more, several, saved, saved, less):
        assert_identical(step(lambda: offload, one), step(nullcontext, one))


@pytest.mark.parametrize("place", [0, 1], ids=["written", "read"])
def test_what_is_no_tensor_may_be_given_to_a_kernel(
    place: int, client: storm.Client, followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_all(monkeypatch)

    class Wrapping(Gated):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            made = torch.empty_like(a)
            given = [made, a, b]
            given[place] = SimpleNamespace(base=given[place], device=a.device)  # type: ignore[call-overload]
            gate[(1,)](*given, WIDTH)
            ctx.save_for_backward(a, b)
            return made

    offload = trained(client, lambda x, w: Wrapping.apply(x @ w, x @ w).square())
    assert not decisions(offload, "gate")


@pytest.mark.parametrize(
    ("made", "loss", "raises"),
    [
        (lambda x, w: Gated.apply(x @ w, x @ w), lambda y: y.exp().tanh().square(), False),
        (lambda x, w: Gated.apply(x @ w, x @ w), lambda y: y.square().exp(), True),
        (put_into(torch.zeros_like, 2), lambda y: y.square().exp(), True),
    ],
    ids=["not saved", "recomputed", "offloaded"],
)
def test_a_write_in_place_that_no_step_has_tried_changes_no_bits(
    made: Forward,
    loss: Callable[[Tensor], Tensor],
    raises: bool,
    client: storm.Client,
    followed: Followed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay_all(monkeypatch)
    writes = False

    def forward(x: Tensor, w: Tensor) -> Tensor:
        y = made(x, w)
        found = loss(y)
        if writes:
            turn[(1,)](y.detach(), seeded("cpu", ROWS, WIDTH), WIDTH)
        return found

    offload = trained(client, forward)
    writes = True
    expected = step(nullcontext, forward)
    with pytest.raises(ActivationLost, match="written in place") if raises else nullcontext():
        assert_identical(step(lambda: offload, forward), expected)
