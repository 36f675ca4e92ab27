"""Random programs of views, in-place changes and operations that save, each named by its seed."""

from __future__ import annotations

from random import Random

import torch
from support.training import Context, seeded
from torch import Tensor

__all__ = ["run"]

SIDE = 24
STEPS = 30


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
        loss = torch.stack([value.sum() for value in values]).tanh().sum()
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
