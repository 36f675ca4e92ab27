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


def _text(config: str, model: str, **options: Any) -> Make:
    def make() -> Trained:
        torch.manual_seed(0)
        settings = getattr(transformers, config)(**_TEXT, **options)
        return Trained(getattr(transformers, model)(settings), _tokens())

    return make


def gpt2() -> Trained:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4)
    return Trained(transformers.GPT2LMHeadModel(config), _tokens())


def mamba() -> Trained:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    return Trained(transformers.MambaForCausalLM(config), _tokens(8))


def t5() -> Trained:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Trained(transformers.T5ForConditionalGeneration(config), _tokens())


def vit() -> Trained:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    return Trained(transformers.ViTForImageClassification(config), _images(32))


def resnet() -> Trained:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=5
    )
    return Trained(transformers.ResNetForImageClassification(config), _images(64))


def convnext() -> Trained:
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_labels=5
    )
    return Trained(transformers.ConvNextForImageClassification(config), _images(64))


def wav2vec2() -> Trained:
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=30,
        mask_time_prob=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    torch.manual_seed(3)
    return Trained(model, {"input_values": torch.randn(2, 800), "labels": torch.tensor([1, 0])})


MODELS: dict[str, Make] = {
    "llama": _text("LlamaConfig", "LlamaForCausalLM", num_key_value_heads=2),
    "qwen2": _text("Qwen2Config", "Qwen2ForCausalLM", num_key_value_heads=2),
    "gemma2": _text("Gemma2Config", "Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8),
    "mixtral": _text(
        "MixtralConfig", "MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4
    ),
    "bert": _text("BertConfig", "BertForMaskedLM"),
    **{make.__name__: make for make in (gpt2, mamba, t5, vit, resnet, convnext, wav2vec2)},
}
