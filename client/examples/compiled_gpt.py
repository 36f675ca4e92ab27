"""The same small GPT as gpt.py, compiled with its offload inside, fed ahead, and never waited for.

The losses are those of `torch.compile(model)`, to the bit.
"""

import os
import sys
from pathlib import Path

import storm_client as storm
import torch
from gpt import DEVICE, GPT, LENGTH, ROWS, STEPS
from torch import nn


def batches(data):
    # of its own: the Feeder's thread would take turns with dropout at the global one, by chance
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        starts = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main(budget="least", codegen="inductor"):
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    compiled = storm.compile(model, budget=budget, codegen=codegen, min_bytes=1 << 16)
    with (
        storm.Feeder(batches(data), device=DEVICE) as feeder,
        storm.Receiver(lambda step, loss: print(f"step {step}: loss {loss:.6f}")) as report,
    ):
        for step, (x, y) in enumerate(feeder):
            logits = compiled(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(step, loss)
    for plan in storm.compiled_plans(compiled):
        print(plan)


if __name__ == "__main__":
    main(*sys.argv[1:])
