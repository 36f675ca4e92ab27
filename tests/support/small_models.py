"""Models of transformers, small, with random weights and inputs: what nobody here wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

__all__ = ["MODELS", "Trained"]

WORDS = 100
_TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_STAGES: dict[str, Any] = {
    "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1],
    "num_labels": 5,
}


class Trained(NamedTuple):
    """A model, and what it is called with: its result has a loss."""

    model: nn.Module
    inputs: dict[str, torch.Tensor]


Make = Callable[[], Trained]


def _tokens(length: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randint(3, WORDS - 1, (2, length)) for name in ("input_ids", "labels")}


def _images(size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([1, 2])}


def _sounds() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {"input_values": torch.randn(2, 800), "labels": torch.tensor([1, 0])}


def _of(
    config: str, model: str, inputs: Callable[[], dict[str, torch.Tensor]], **options: Any
) -> Make:
    """Return what makes a model by the names of its classes, with random weights."""

    def make() -> Trained:
        torch.manual_seed(0)
        settings = getattr(transformers, config)(**options)
        return Trained(getattr(transformers, model)(settings), inputs())

    return make


MODELS: dict[str, Make] = {
    "llama": _of("LlamaConfig", "LlamaForCausalLM", _tokens, **_TEXT, num_key_value_heads=2),
    "qwen2": _of("Qwen2Config", "Qwen2ForCausalLM", _tokens, **_TEXT, num_key_value_heads=2),
    "gemma2": _of(
        "Gemma2Config", "Gemma2ForCausalLM", _tokens, **_TEXT, num_key_value_heads=2, head_dim=8
    ),
    "mixtral": _of(
        "MixtralConfig", "MixtralForCausalLM", _tokens, **_TEXT,
        num_key_value_heads=2, num_local_experts=4,
    ),
    "bert": _of("BertConfig", "BertForMaskedLM", _tokens, **_TEXT),
    "gpt2": _of(
        "GPT2Config", "GPT2LMHeadModel", _tokens, vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4
    ),
    "mamba": _of(
        "MambaConfig", "MambaForCausalLM", lambda: _tokens(8),
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4,
    ),
    "t5": _of(
        "T5Config", "T5ForConditionalGeneration", _tokens,
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    ),
    "vit": _of(
        "ViTConfig", "ViTForImageClassification", lambda: _images(32),
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=5,
    ),
    "resnet": _of(
        "ResNetConfig", "ResNetForImageClassification", lambda: _images(64),
        embedding_size=8, **_STAGES,
    ),
    "convnext": _of(
        "ConvNextConfig", "ConvNextForImageClassification", lambda: _images(64), **_STAGES
    ),
    "wav2vec2": _of(
        "Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", _sounds,
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=30,
        mask_time_prob=0.0,
    ),
}  # fmt: skip
