"""The demo's GPT."""

from __future__ import annotations

import math

import torch
from storm_bench.demo.model import GPT, Shape

SHAPE = Shape(layers=2, width=32, heads=2, rows=3, length=16)


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (3, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_starts_at_the_loss_of_guessing() -> None:
    torch.manual_seed(0)
    loss = GPT(SHAPE)(*_tokens())
    assert abs(loss.item() - math.log(256)) < 0.1


def test_every_parameter_gets_a_gradient() -> None:
    model = GPT(SHAPE)
    model(*_tokens()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_looks_back_only() -> None:
    model = GPT(SHAPE, dropout=0.0)
    x = torch.randn(1, 16, 32)
    changed = x.clone()
    changed[:, -1] += 1.0
    before, after = model.blocks(x), model.blocks(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
