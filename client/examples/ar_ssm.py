"""Trains AR-SSM layers on bytes, or on selective copy, with or without stormd.

    python ar_ssm.py bytes --offload     # a language model on Python's own sources
    python ar_ssm.py copy                # a stream of tokens; some are marked, some ask
    python ar_ssm.py copy --plain        # the same with plain cumulative sums: nothing is forgotten

In selective copy every asking token wants the symbol that was marked last, however long ago, among
noise. Each step's loss is printed in full: with --offload they are the same.
"""

import argparse
import contextlib
import os
from pathlib import Path

import storm_client as storm
import torch
from storm_kernels.nn import AdaptiveRankSemiseparable
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH, LAYERS = 32, 64, 2
SYMBOLS = 8
ASK = 2 * SYMBOLS  # after the symbols as noise and the symbols marked


class Block(nn.Module):
    def __init__(self, decay):
        super().__init__()
        self.before_mixing, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixing = AdaptiveRankSemiseparable(WIDTH, decay=decay)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.mixing(self.before_mixing(x))[0]
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Sequential):
    def __init__(self, tokens, decay):
        blocks = [Block(decay) for _ in range(LAYERS)]
        norm = nn.LayerNorm(WIDTH)
        super().__init__(nn.Embedding(tokens, WIDTH), *blocks, norm, nn.Linear(WIDTH, tokens))


def copy_batch(length, generator):
    """Return tokens and, where they ask, the symbol marked last; elsewhere -100."""
    shape = (ROWS, length)
    draw = torch.rand(shape, generator=generator)
    marked, asks = draw < 0.06, draw > 0.9
    marked[:, 0], asks[:, 0] = True, False
    symbols = torch.randint(SYMBOLS, shape, generator=generator)
    noise = torch.randint(SYMBOLS, shape, generator=generator)
    tokens = torch.where(marked, SYMBOLS + symbols, noise).masked_fill(asks, ASK)
    places = torch.where(marked, torch.arange(length), 0).cummax(1).values
    return tokens, symbols.gather(1, places).masked_fill(~asks, -100)


def bytes_batches():
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def batch(length, generator):
        starts = torch.randint(len(data) - length - 1, (ROWS,), generator=generator)
        rows = torch.stack([data[start : start + length + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    return batch


def right(model, batch, length):
    """Return the share of right answers on eight batches that training has not seen."""
    generator = torch.Generator().manual_seed(1)
    found = asked = 0
    with torch.no_grad():
        for _ in range(8):
            tokens, answers = (one.to(DEVICE) for one in batch(length, generator))
            known = answers >= 0
            found += (model(tokens).argmax(-1) == answers)[known].sum().item()
            asked += known.sum().item()
    return found / asked


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("bytes", "copy"))
    parser.add_argument("--plain", action="store_true", help="layers without decay")
    parser.add_argument("--offload", action="store_true", help="let stormd keep the activations")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(0)
    batch = bytes_batches() if args.task == "bytes" else copy_batch
    model = Model(256 if args.task == "bytes" else ASK + 1, not args.plain).to(DEVICE)
    keep = storm.offload(model, min_bytes=1 << 16) if args.offload else contextlib.nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        tokens, answers = (one.to(DEVICE) for one in batch(args.length, generator))
        with keep:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        print(f"step {step}: loss {loss.item().hex()}")
    print(f"right: {right(model, batch, args.length):.4f}")


if __name__ == "__main__":
    main()
