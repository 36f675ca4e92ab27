"""The benchmark's Llama: decoder layers of transformers, trained as a script of theirs would.

Weights are random and in bfloat16, attention is PyTorch's, and a step includes that of AdamW. With
a `rank`, all seven linear modules of each layer have LoRA adapters of that rank, and only the
adapters are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["Llama", "LlamaWorkload"]

_PRODUCTS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class LlamaWorkload:
    """Shapes of the layers, and the tokens of one step as batch and length."""

    layers: int
    batch: int
    length: int
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    groups: int = 8
    """The number of heads of keys and values."""
    vocabulary: int = 32_000
    rank: int = 0
    """The rank of the LoRA adapters; 0 trains everything."""


class Llama(nn.Module):
    """The layers, and the model's parts before and after them."""

    def __init__(self, work: LlamaWorkload) -> None:
        """Build the model with random weights.

        Raises:
            ImportError: transformers, or for a rank peft, is not installed.
        """
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=work.width,
            intermediate_size=work.hidden,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.groups,
            vocab_size=work.vocabulary,
            max_position_embeddings=work.length,
            attn_implementation="sdpa",
            use_cache=False,
        )
        net = LlamaForCausalLM(config)
        self.net: Any = net  # its parts have no types
        if work.rank:
            from peft import LoraConfig, inject_adapter_in_model

            adapters = LoraConfig(r=work.rank, lora_alpha=work.rank, target_modules=_PRODUCTS)
            inject_adapter_in_model(adapters, net)
            for name, parameter in net.named_parameters():
                parameter.requires_grad_("lora_" in name)
        self._places: tuple[Tensor, Tensor] | None = None

    @property
    def blocks(self) -> list[Callable[[Tensor], Tensor]]:
        """The layers as functions of [batch, length, width]; `embed` sets the tokens' positions."""
        return [partial(self._layer, layer) for layer in self.net.model.layers]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the layers' input, [batch, length, width]; `tokens` are int64 [batch, length]."""
        x: Tensor = self.net.model.embed_tokens(tokens)
        numbers = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        self._places = self.net.model.rotary_emb(x, numbers)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the head's output for `x`, [batch, length, vocabulary]."""
        found: Tensor = self.net.lm_head(self.net.model.norm(x))
        return found

    def _layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        # Without a mask PyTorch's attention is causal.
        out: Tensor = layer(x, position_embeddings=self._places, attention_mask=None)
        return out
