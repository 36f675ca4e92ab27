"""Four families of small but realistic models, and a few training steps of each.

The seed determines everything. Each model is trained for some steps before its tensors are
captured, so that they are not those of an initialisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import saved_tensors_hooks

__all__ = ["FAMILIES", "Family", "train"]

_WIDTH = 256
_LENGTH = 128
_BATCH = 8
_VOCABULARY = 512
_SEED = 0


class _Attention(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = width // 64
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout)


class _GatedMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


class _Block(nn.Module):
    def __init__(self, norm: type[nn.Module], mlp: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(_WIDTH), norm(_WIDTH)
        self.attention, self.mlp = _Attention(_WIDTH, dropout), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class _LanguageModel(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(_LENGTH, _WIDTH))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens) + self.places))
        return logits


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(x + self.norm_2(self.conv_2(y)))


def _llama() -> nn.Module:
    return _LanguageModel([_Block(nn.RMSNorm, _GatedMlp(_WIDTH), 0.0) for _ in range(3)])


def _gpt() -> nn.Module:
    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), nn.Dropout(0.1)
        )

    return _LanguageModel([_Block(nn.LayerNorm, mlp(), 0.1) for _ in range(3)])


def _relu_mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), _Residual(32), _Residual(32),
        nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), _Residual(64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def _tokens() -> tuple[Tensor, Tensor]:
    """Return inputs and targets that can be learned: a token mostly follows from the previous."""
    noise = torch.randint(0, 4, (_BATCH, _LENGTH + 1))
    tokens = noise.cumsum(1).mul(37) % _VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _images() -> tuple[Tensor, Tensor]:
    """Return noisy images of waves, and classes, which are the directions of the waves."""
    labels = torch.randint(0, 10, (32,))
    angle = labels.float() * torch.pi / 10
    y, x = torch.meshgrid(torch.linspace(-3, 3, 32), torch.linspace(-3, 3, 32), indexing="ij")
    waves = torch.sin(3 * (x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]))
    return waves[:, None] + 0.3 * torch.randn(32, 3, 32, 32), labels


@dataclass(frozen=True)
class Family:
    """A kind of model: how to make one and its batches, and whether autocast is used."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    autocast: bool


FAMILIES = (
    Family("Llama-like, bfloat16", _llama, _tokens, autocast=False),
    Family("GPT with dropout, autocast", _gpt, _tokens, autocast=True),
    Family("ReLU MLP, bfloat16", _relu_mlp, _images, autocast=False),
    Family("CNN, autocast", _cnn, _images, autocast=True),
)


def train(family: Family, steps: int, last: saved_tensors_hooks) -> nn.Module:
    """Train a new model for `steps` steps; the last forward pass runs under `last`.

    Returns the model. Runs on the CPU and sets torch's seed.
    """
    torch.manual_seed(_SEED)
    model = family.model()
    if not family.autocast:
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps - 1):
        torch.autograd.backward(_loss(family, model))
        optimizer.step()
        optimizer.zero_grad()
    with last:
        loss = _loss(family, model)
    torch.autograd.backward(loss)
    return model


def _loss(family: Family, model: nn.Module) -> Tensor:
    inputs, targets = family.batch()
    if inputs.is_floating_point() and not family.autocast:
        inputs = inputs.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=family.autocast):
        outputs = model(inputs)
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
