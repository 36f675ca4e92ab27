"""What steps of small models save: nothing stays that could leave, and most can be recomputed."""

from __future__ import annotations

import pytest
import storm_client as storm
import torch
from bench.saved_bytes import makers, measured

MAX_STAYING = 0.02
"""Of what a step saves, without parameters and small tensors."""

RECOMPUTABLE = {
    "llama": 0.99,
    "lora": 0.99,
    "moe": 0.99,
    "fp32amp": 0.99,
    "liger": 0.9,
    "vit": 0.95,
    "convnext": 0.95,
    "diffusion transformer": 0.95,
    "graph attention": 0.9,
    "ranking": 0.9,
    "Whisper": 0.95,
    "Mixtral": 0.94,
    "Gemma": 0.95,
    "Mamba": 0.95,
    "U-Net": 0.94,
    "ResNet": 0.85,
}
"""Shares of what a step saves, of models whose attention drops nothing out."""


@pytest.mark.parametrize("name", [*RECOMPUTABLE, "LSTM", "encoder", "T5"])
def test_what_steps_of_models_save_can_leave_or_be_recomputed(
    name: str, client: storm.Client
) -> None:
    torch.manual_seed(0)
    saved = measured(makers()[name](), client)
    assert saved.total > 1 << 18
    assert saved.staying.total() <= MAX_STAYING * saved.total, saved.staying
    assert saved.recomputable >= RECOMPUTABLE.get(name, 0.0) * saved.total, saved.offloadable
