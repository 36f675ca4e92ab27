"""Trains a network of transformer layers with Lightning, its activations kept by stormd.

--plain leaves the callback out; the losses are the same.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from storm_client.integrations.lightning import OffloadCallback
from torch import nn
from torch.utils.data import DataLoader

LENGTH, WIDTH = 256, 256


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def training_step(self, rows):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.blocks(self.tokens(rows[:, :-1]), mask=mask, is_causal=True)
        logits = self.head(hidden).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
        print(f"step {self.global_step}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: 128 * (LENGTH + 1)]
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, LENGTH + 1)
    callback = OffloadCallback()
    trainer = lightning.Trainer(
        max_steps=args.steps,
        callbacks=[] if args.plain else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(rows, batch_size=8))
    if not args.plain:
        print(callback.offload.stats())


if __name__ == "__main__":
    main()
