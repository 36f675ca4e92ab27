"""Numbers of a step are floats to its code: what it computes with them is what a run computes."""

from __future__ import annotations

import copy
import json
import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from support.training import assert_identical, seeded
from torch import Tensor, nn

Wrap = Callable[..., CompiledStep]

COMPUTED: dict[str, Callable[[float], object]] = {
    "+": lambda x: (x + 2, 2 + x, x + x, sum([x, 3.5, x])),
    "sum": lambda x: (sum([x / 3, 0.1, 2, 0.7, x], x), sum([0.1, 0.2, 0.3, x, 1e9])),
    "-": lambda x: (x - 2, 2 - x, -x, +x),
    "*": lambda x: (x * True, 3 * x),
    "/": lambda x: (x / 3, 3 / x),
    "//": lambda x: (x // 0.1, 3 // x),
    "%": lambda x: (x % 0.1, 3 % x, divmod(x, 0.1), divmod(7, x)),
    "**": lambda x: (x**0.5, 2**x, pow(x, 3)),
    "abs": lambda x: abs(-x),
    "round": lambda x: (round(x, 3), round(x, -1)),
    "real": lambda x: (x.real, x.imag, x.conjugate()),
    "copies": lambda x: copy.deepcopy({"x": x, "y": copy.copy(x)}),
    "types": lambda x: [isinstance(x, kind) for kind in (float, int, str, numbers.Real)],
    "the floats": lambda x: {k: v for k, v in {"x": x, "n": 3, "t": "a"}.items() if is_number(v)},
    "another type": lambda x: (x == "a", x != None),  # noqa: E711
    "greatest": lambda x: (torch.sym_max(x, 1.0), torch.sym_min(x, 1.0) // 2),
}
"""What a number that only a run knows may be used for."""

ASKED: dict[str, Callable[[Any], object]] = {
    "int": int,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "sqrt": math.sqrt,
    "isnan": math.isnan,
    "is_integer": lambda x: x.is_integer(),
    "as_integer_ratio": lambda x: x.as_integer_ratio(),
    "hex": lambda x: x.hex(),
    "str": str,
    "repr": repr,
    "format": lambda x: f"{x:.3f}",
    "%s": lambda x: "a rate of %s" % x,  # noqa: UP031
    "%f": lambda x: "a rate of %f" % x,  # noqa: UP031
    "in a list": lambda x: str([x]),
    "hash": lambda x: {x: 1},
    "bool": lambda x: not x,
    "or": lambda x: x or 0,
    "<": lambda x: x < 0.1,
    "==": lambda x: x in (0.1, 0.2),
    "max": lambda x: max(x, 1.0),
    "of NumPy": np.float64,
    "in an array": lambda x: np.array([x, 1.0]).sum(),
}
"""What decides by a number: a float's methods that do not give floats, and functions in C."""


def is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def trained(use: Callable[[Any], object], of_rate: bool) -> tuple[Any, Callable[[Tensor], object]]:
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> object:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return use(optimizer.param_groups[0]["lr"] if of_rate else loss.item())

    return optimizer, step


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("of_rate", [False, True])
def test_what_is_computed_of_a_number_is_what_python_computes(
    name: str, of_rate: bool, wrap: Wrap
) -> None:
    optimizer, call = trained(COMPUTED[name], of_rate)
    expecting, step = trained(COMPUTED[name], of_rate)
    call = wrap(call)
    for rate in (0.1, 0.3, 0.2):
        optimizer.param_groups[0]["lr"] = expecting.param_groups[0]["lr"] = rate
        x = seeded("cpu", 4, 8)
        assert repr(call(x)) == repr(step(x))
    assert len(call.captures()) == 1


@pytest.mark.parametrize("name", ASKED)
def test_what_decides_by_a_computed_number_is_refused_by_its_line(name: str, wrap: Wrap) -> None:
    _, step = trained(ASKED[name], of_rate=False)
    with pytest.raises(UsageError, match=r"reads what a tensor holds \(.*test_scalars.py"):
        wrap(step)(seeded("cpu", 4, 8))


@pytest.mark.parametrize("name", ASKED)
def test_what_decides_by_a_rate_is_captured_for_it(name: str, wrap: Wrap) -> None:
    optimizer, step = trained(ASKED[name], of_rate=True)
    call = wrap(step)
    for rate in (0.1, 0.3, 0.1, 1.0):
        optimizer.param_groups[0]["lr"] = rate
        found = call(seeded("cpu", 4, 8))
        assert (type(found), found) == (type(ASKED[name](rate)), ASKED[name](rate))


def test_a_comparison_is_for_all_rates_of_one_outcome(wrap: Wrap) -> None:
    optimizer, step = trained(lambda rate: rate < 0.25, of_rate=True)
    call = wrap(step)
    for rate, count in ((0.1, 1), (0.2, 1), (0.3, 2), (0.4, 2), (0.1, 2)):
        optimizer.param_groups[0]["lr"] = rate
        assert call(seeded("cpu", 4, 8)) is (rate < 0.25)
        assert len(call.captures()) == count


def test_a_number_has_all_methods_of_a_float(wrap: Wrap) -> None:
    of_the_type = {"__new__", "__getattribute__", "__getnewargs__", "__getformat__", "__doc__"}

    def step(x: Tensor) -> None:
        own = vars(type(x.sum().item()))
        assert vars(float).keys() - own.keys() <= {*of_the_type, "fromhex", "from_number"}

    wrap(step)(torch.ones(2))


@pytest.mark.parametrize("use", [lambda x: np.float32(2) * x, lambda x: x - np.float64(1)])
def test_a_number_of_numpy_s_beside_one_of_the_step_is_refused(
    use: Callable[[Any], object], wrap: Wrap
) -> None:
    _, step = trained(use, of_rate=False)
    with pytest.raises(UsageError, match=r"as a number.*test_scalars.py"):
        wrap(step)(seeded("cpu", 4, 8))


TEXTS: dict[str, Callable[[Tensor], object]] = {
    "str": str,
    "repr": repr,
    "format": lambda x: f"{x}",
    "format with digits": lambda x: f"{x:.3f}",
    "%": lambda x: "a loss of %s" % x,  # noqa: UP031
    "in a list": lambda x: str([x]),
    "json": lambda x: json.dumps({"x": x.item()}),
}


@pytest.mark.parametrize("is_detached", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_tensor_is_refused_by_its_line(
    name: str, is_detached: bool, wrap: Wrap
) -> None:
    weight = torch.ones((), requires_grad=True)

    def step(x: Tensor) -> object:
        loss = (x * weight).sum()
        return TEXTS[name](loss.detach() if is_detached else loss)

    with pytest.raises(UsageError, match=r"reads what a tensor holds \(.*test_scalars.py"):
        wrap(step)(torch.ones(4))


@pytest.mark.parametrize("through", ["backward", "grad"])
def test_hooks_and_backward_passes_in_python_are_watched_too(through: str, wrap: Wrap) -> None:
    """They run within a function of PyTorch's, in which modes are off."""
    scale, made = torch.full((), 2.0), list[Callable[[Tensor], object]]()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * made[0](scale)

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = Scaled.apply(x).sum()
        if through == "grad":
            return torch.autograd.grad(loss, x)[0]
        loss.backward()
        return x.grad

    call = wrap(step)
    for use, named in ((lambda x: x.tolist(), "tolist"), (lambda x: len(str(x)), "repr")):
        made[:] = [use]
        with pytest.raises(UsageError, match=rf"{named}.*test_scalars.py"):
            call(torch.ones(4))
    made[:] = [lambda x: round(x.item() // 0.75, 1)]
    for value in (2.0, 3.0):
        scale.fill_(value)
        assert_identical([call(torch.ones(4))], [step(torch.ones(4))])


SUMS: dict[str, Callable[[float, Tensor], Any]] = {
    "numbers": lambda total, loss: total + loss.item(),
    "rounded": lambda total, loss: round(total + loss.item() * 2, 3),
    "in a loss": lambda total, loss: total + (loss * (1 + total)).item(),
    "before a write": lambda total, loss: (total + loss.item(), loss.detach().mul_(2))[0],
}


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_numbers_may_be_summed_up_over_micro_batches(
    name: str, count: int, codegen: str, wrap: Wrap
) -> None:
    def run(make: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x: Tensor) -> object:
            total, before = 0.0, optimizer.param_groups[0]["lr"]
            for part in storm.micro_batches(x, count):
                loss = net(part).square().mean() / count
                loss.backward()
                total = SUMS[name](total, loss)
                before = operator.mul(before, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return total, total / count, before

        call = make(step)
        found = [call(seeded("cpu", 10, 4, seed=n)) for n in range(3)]
        assert all(type(one) is float for one in found[-1])
        return [torch.tensor(found, dtype=torch.float64), *net.parameters()]

    compiled, expected = run(lambda step: wrap(step, codegen=codegen)), run(lambda step: step)
    if codegen == "eager":
        assert_identical(compiled, expected)
    for one, other in zip(compiled, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
