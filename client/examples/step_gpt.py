"""The same small GPT as gpt.py, its whole step captured: forward, loss, backward and update.

Batches are fed ahead and losses never waited for. The update is over micro-batches, which are a
loop of the plan. With codegen "eager" the losses are those of the function itself, to the bit.
"""

import os
import sys
from pathlib import Path

import storm_client as storm
import torch
from compiled_gpt import batches
from gpt import DEVICE, GPT
from torch import nn


def main(budget="least", codegen="inductor", picture=None):
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)

    def step(x, y):
        total = 0.0
        for a, b in storm.micro_batches((x, y), 2):
            loss = nn.functional.cross_entropy(model(a).flatten(0, 1), b.flatten()) / 2
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    if codegen != "none":
        step = storm.compile_step(step, budget=budget, codegen=codegen, min_bytes=1 << 16)
    with (
        storm.Feeder(batches(data), device=DEVICE) as feeder,
        storm.Receiver(lambda number, loss: print(f"step {number}: loss {loss:.6f}")) as report,
    ):
        for number, (x, y) in enumerate(feeder):
            report(number, step(x, y))
            schedule.step()
    if codegen != "none":
        explained = step.explain()
        print(explained)
        if picture:
            explained.draw(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
