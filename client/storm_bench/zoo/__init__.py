"""Steps of models that nobody tuned for, by several methods; the client's side of `bench zoo`.

command   the rows, one after another, and how they are shown
row       one model by one method, in a process of its own: `python -m storm_bench.zoo`
models    what is trained
methods   the ways to train it

Models are from the libraries that people use. stormd is called as the documentation shows, with
only the budget set.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["METHODS", "MODELS", "OFFLOADS", "name_of"]

MODELS: Final = {
    "llama": "Llama, width 2048, 10 layers",
    "lora": "Llama, width 2048, LoRA of rank 16",
    "liger": "Llama with Liger kernels",
    "float8": "Llama with torchao float8",
    "fp32amp": "Llama, 6 layers, float32 with bfloat16 autocast",
    "fp16scaler": "Llama, 6 layers, float32 with float16 autocast",
    "moe": "Qwen3-MoE, width 1024, 8 layers",
    "vit": "ViT-L, 128 images",
    "gpt2": "GPT-2, width 1024, 16 layers, dropout",
    "bert": "BERT, width 1024, 16 layers",
    "convnext": "ConvNeXt-B, 96 images",
    "eager": "Llama, 6 layers, eager attention",
    "t5": "T5, width 1024, 12 layers each way, dropout",
    "whisper": "Whisper, width 768, 12 layers each way",
    "wav2vec2": "wav2vec2, width 768, 12 layers",
    "resnet": "ResNet-50, 256 images",
    "swin": "Swin-B, 96 images",
    "efficientnet": "EfficientNet-B4, 96 images",
    "ranks": "Llama 8B, 6 layers, 8,192 tokens a rank",
    "split": "Llama, half of its layers on each of two GPUs",
}
"""The trained models, and their names in tables."""

OFFLOADS: Final = "storm"
"""The method that has a budget."""

METHODS: Final = ("none", "checkpoint", "selective", "trl", OFFLOADS)


def name_of(row: dict[str, Any]) -> str:
    """Return a row's method, and its budget if it has one."""
    return f"{row['method']} {row.get('budget') or ''}".strip()
