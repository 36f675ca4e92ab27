"""Trains a Llama with transformers' Trainer, its activations kept by stormd: one line more.

--plain leaves that line out; the losses are the same.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from storm_client.integrations.transformers import offload_trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH, ROWS = 256, 64


def rows_of_text():
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[: ROWS * LENGTH]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(ROWS, LENGTH)
    return [{"input_ids": row, "labels": row} for row in tokens]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-4,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(model=model, args=settings, train_dataset=rows_of_text())
        if not args.plain:
            offload_trainer(trainer)
        trainer.train()
    if not args.plain:
        print(trainer.storm_offload.stats())


if __name__ == "__main__":
    main()
