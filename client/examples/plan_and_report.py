"""Trains a stack of MLP blocks and prints what was decided for each tensor, and what came of it.

python plan_and_report.py [--budget BUDGET] [--draw step.svg] [--wait]

--wait keeps the trainer until Enter is pressed, to look at `stormd top` meanwhile.
"""

import argparse

import storm_client as storm
import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, ROWS, WIDTH, LAYERS = 6, 4096, 256, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser(description="Print a plan and what came of it.")
    parser.add_argument("--budget", help="what may stay, as in 0.5 or 64MiB (default: least)")
    parser.add_argument("--draw", metavar="FILE", help="draw the last step, as .svg or .png")
    parser.add_argument("--wait", action="store_true", help="wait for Enter at the end")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    offload = storm.offload(model, budget=options.budget)
    for _ in range(STEPS):
        x, y = torch.randn(ROWS, WIDTH, device=DEVICE), torch.randint(10, (ROWS,), device=DEVICE)
        with offload:
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = offload.report()
    print(offload.plan)
    print()
    print(report)
    if options.draw:
        report.draw(options.draw)
    if options.wait:
        input("Enter ends it ")


if __name__ == "__main__":
    main()
