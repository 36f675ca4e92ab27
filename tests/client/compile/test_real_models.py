"""Whole models of transformers, compiled: losses and gradients of two steps, bit for bit.

All are slow: in generated code and under autocast they take a C++ compiler minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import storm_client as storm
import torch
from support.compiled_programs import PLAIN
from support.training import assert_identical
from torch import Tensor

pytest.importorskip("transformers", reason="the models are its")

from support.small_models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")


def two_steps(
    name: str, wrap: Callable[[torch.nn.Module], Callable[..., object]], *, is_cast: bool
) -> list[Tensor]:
    torch._dynamo.reset()
    model, inputs = MODELS[name]()
    model.train()
    call = wrap(model)
    found: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(step)  # of dropout
        with torch.autocast("cpu", enabled=is_cast):
            loss = call(**inputs).loss
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)
    torch._dynamo.reset()
    return found + [p.grad for p in model.parameters() if p.grad is not None]


def compare(name: str, client: storm.Client, codegen: str, *, is_cast: bool = False) -> None:
    made: list[Callable[..., object]] = []

    def wrap(model: torch.nn.Module) -> Callable[..., object]:
        made.append(storm.compile(model, client=client, min_bytes=1, budget=0.0, codegen=codegen))
        return made[-1]

    expected = two_steps(
        name, lambda model: torch.compile(model, backend=PLAIN[codegen]), is_cast=is_cast
    )
    assert_identical(two_steps(name, wrap, is_cast=is_cast), expected)
    rows = [row for plan in storm.compiled_plans(made[0]) for row in plan.rows]
    assert {row.decision for row in rows} & {"offload", "replay"}


@pytest.mark.slow
@pytest.mark.parametrize("is_cast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("codegen", PLAIN)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_identical(
    name: str, codegen: str, is_cast: bool, client: storm.Client
) -> None:
    compare(name, client, codegen, is_cast=is_cast)
