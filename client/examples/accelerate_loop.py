"""Trains a network of transformer layers in a loop with Accelerate, with stormd: two lines more."""

import os
from pathlib import Path

import storm_client as storm
import torch
from accelerate import Accelerator
from storm_client.integrations.accelerate import accumulate
from torch import nn

LENGTH, WIDTH = 256, 256


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, rows):
        hidden = self.blocks(self.tokens(rows[:, :-1]), mask=self.mask, is_causal=True)
        logits = self.head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, rows[:, 1:].flatten())


def main():
    torch.manual_seed(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 32 * (LENGTH + 1)]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH + 1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    offload = storm.offload(model)
    for step, batch in enumerate(loader):
        with accumulate(accelerator, offload, model):
            loss = model(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"micro-batch {step}: loss {loss.item():.6f}")
    print(offload.stats())


if __name__ == "__main__":
    main()
