"""The benchmark's model: a plain GPT with activations like those of a large one.

Every shape follows from `Workload`: RMSNorm, fused qkv, causal attention, SwiGLU of 8/3 of the
width rounded down to 128, learned positions, cross-entropy in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["Block", "Gpt", "Workload", "attention"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Width, layers, and the tokens of one step as batch and length; `head` is a head's width."""

    width: int
    layers: int
    batch: int
    length: int
    vocabulary: int = 32_000
    head: int = 128


class Block(nn.Module):
    """Attention, then SwiGLU, each on the normalised input; the output is added to the input."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        hidden = _hidden(width)
        self.heads = width // head
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.gated: nn.Module | None = None
        """A module that computes the SwiGLU in place of these three, if there is one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape [batch, length, width] of its input."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        attended = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        if self.gated is not None:
            out: Tensor = x + self.gated(y)
        else:
            out = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Gpt(nn.Module):
    """The blocks, and the model's parts before and after them."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.token = nn.Embedding(work.vocabulary, work.width)
        self.position = nn.Embedding(work.length, work.width)
        self.blocks = nn.ModuleList(Block(work.width, work.head) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.width)
        self.head = nn.Linear(work.width, work.vocabulary, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the blocks' input, [batch, length, width]; `tokens` are int64 [batch, length]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(places)
        return embedded

    def logits(self, x: Tensor) -> Tensor:
        """Return the head's output for `x`, [batch, length, vocabulary]."""
        found: Tensor = self.head(self.norm(x))
        return found


def attention(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that selects the attention: flash on a GPU, else the math version."""
    backend = SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    context: AbstractContextManager[None] = sdpa_kernel(backend)
    return context


def _hidden(width: int) -> int:
    return 8 * width // 3 // 128 * 128
