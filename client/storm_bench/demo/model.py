"""A GPT small enough for two cores, with far more activations than weights.

Every operation of its forward and backward is deterministic, attention included, so that gradients
may be compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from storm_bench.demo.text import VOCABULARY

__all__ = ["GPT", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the model and its batches are; `length` is tokens a row."""

    layers: int
    width: int
    heads: int
    rows: int
    length: int


class Block(nn.Module):
    """Attention, then an MLP, each on the normalised input; the output is added to the input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.attention = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape [rows, length, width] of its input."""
        x = x + self.dropout(self.projection(self._attend(self.norm_attention(x))))
        hidden = functional.gelu(self.up(self.norm_mlp(x)))
        out: Tensor = x + self.dropout(self.down(hidden))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.attention(x).chunk(3, dim=2)
        )
        with sdpa_kernel(SDPBackend.MATH):  # flash attention's backward is not deterministic
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, length, width)


class GPT(nn.Module):
    """Maps bytes to the loss of predicting each next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy; both arguments are int64 [rows, length]."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.blocks(self.tokens(inputs) + self.places(places))
        logits = self.head(self.norm(x))
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
