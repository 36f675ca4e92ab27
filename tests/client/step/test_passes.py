"""Operations that do more than compute their results run in each step, though none is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from storm_client.step.compiled import CompiledStep
from support.compiled_programs import perceptron
from support.steps import everything
from support.training import assert_identical
from torch import Tensor

Wrap = Callable[..., CompiledStep]


def asserts(x: Tensor) -> Tensor:
    torch._assert_async(x.trace() > 1)
    return x


def asserts_with_a_message(x: Tensor) -> Tensor:
    torch._assert_async(x.trace() > 1, "no trace")
    return x


CHECKS: dict[Callable[[Tensor], Tensor], str] = {
    torch.linalg.inv: "linalg.inv: .* singular",
    torch.linalg.cholesky: "linalg.cholesky: .* not positive-definite",
    lambda x: torch.linalg.solve(x, torch.ones(32, 32)): "linalg.solve: .* singular",
    asserts: "Expected Tensor with single nonzero value, but got zero",
    asserts_with_a_message: "no trace",
}


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", CHECKS)
def test_what_pytorch_checks_is_checked_in_each_step_before_it_changes_anything(
    check: Callable[[Tensor], Tensor], codegen: str, wrap: Wrap, full_link: None
) -> None:
    """Also where what the check has read is recomputed in the backward pass."""
    net = perceptron("cpu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        loss = net(check(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    call = wrap(step, budget="least", codegen=codegen)
    good, bad = torch.eye(32), torch.zeros(32, 32)
    for _ in range(2):
        call(good)
    before = everything(net, optimizer, "cpu")[:-2]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=CHECKS[check]) as expected:
            step(bad)
        with pytest.raises(type(expected.value)) as raised:
            call(bad)
        assert str(raised.value).startswith(str(expected.value))
        assert_identical(everything(net, optimizer, "cpu")[:-2], before)
    call(good)
    assert len(call.captures()) == 2


def test_a_check_after_the_update_is_of_what_it_has_made(wrap: Wrap) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(x: Tensor) -> None:
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._assert_async((weight > 0).all(), "no weight")

    call = wrap(step)
    call(torch.full((3,), 0.5))
    with pytest.raises(RuntimeError, match="no weight"):
        call(torch.full((3,), 0.75))
    assert weight.tolist() == [-0.25] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_arithmetic_with_numbers_raises_before_anything_is_changed(fused: bool, wrap: Wrap) -> None:
    net = perceptron("cpu")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)

    def step(x: Tensor, y: Tensor) -> float:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1 / (loss.square().item() * y.item())

    call, x = wrap(step), torch.ones(2, 32)
    for fine in (False, True, False):
        before = everything(net, optimizer, "cpu")[:-2]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                call(x, torch.zeros(()))
            assert_identical(everything(net, optimizer, "cpu")[:-2], before)
        if fine:
            call(x, torch.ones(()))


@pytest.fixture
def counted() -> Iterator[list[int]]:
    """Give an operator that counts how often it has run."""
    runs: list[int] = []
    library = torch.library.Library("stormd_test", "DEF")
    library.define("counted(Tensor x) -> Tensor")

    def counted(x: Tensor) -> Tensor:
        runs.append(len(runs))
        return x + len(runs)

    library.impl("counted", counted, "CompositeExplicitAutograd")
    torch.library.register_fake("stormd_test::counted", torch.empty_like, lib=library)
    yield runs
    library._destroy()


@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("is_used", [True, False])
def test_a_custom_operator_runs_in_each_step(
    is_constant: bool, is_used: bool, counted: list[int], wrap: Wrap
) -> None:
    def step(x: Tensor) -> Tensor:
        made = torch.ops.stormd_test.counted(torch.tensor(0.0) if is_constant else x * 0)
        return x + made if is_used else x * 2

    found = []
    for call in (step, wrap(step)):
        counted.clear()
        found.append([call(torch.ones(())) for _ in range(3)])
        assert len(counted) == 3
    assert_identical(found[1], found[0])
