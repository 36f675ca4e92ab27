"""A Llama of a few ten thousand random weights, and rows of tokens to train it on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

WORDS, LENGTH = 128, 48


def tiny_llama(dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """Return a model whose weights are the same at each call."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype)


def token_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return rows in which each token follows from the one before, so that one can learn it."""
    starts = torch.arange(count)[:, None] * 7 + torch.arange(LENGTH)[None, :] * 5
    tokens = 3 + starts % (WORDS - 3)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]
