"""The benchmarks' model: a plain GPT whose activations are what a large one's are.

What stays true: every shape follows from `Workload`, and nothing but the saved tensors differs
between methods: same seed, same kernels, flash attention where the device has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD = 128
VOCABULARY = 32_000


@dataclass(frozen=True)
class Workload:
    """Width, layers, and the tokens of one step as batch and length."""

    width: int
    layers: int
    batch: int
    length: int
    vocabulary: int = VOCABULARY
    head: int = HEAD


WORKLOADS = {
    "W0": Workload(256, 2, 1, 512, vocabulary=1000, head=64),  # for a machine without a GPU
    "W1": Workload(4096, 8, 2, 4096),
    "W2": Workload(8192, 4, 1, 4096),
    "W3": Workload(4096, 4, 1, 32768),
}


class Block(nn.Module):
    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 128 * 128
        self.heads = width // head
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gpt(nn.Module):
    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.token = nn.Embedding(work.vocabulary, work.width)
        self.position = nn.Embedding(work.length, work.width)
        self.blocks = nn.ModuleList(Block(work.width, work.head) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.width)
        self.head = nn.Linear(work.width, work.vocabulary, bias=False)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(
            torch.arange(tokens.shape[1], device=tokens.device)
        )

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(work: Workload, device: torch.device) -> tuple[Gpt, Tensor, Tensor]:
    """Return the model in bfloat16 and the tokens and targets of its step."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(work).to(torch.bfloat16)
        tokens = torch.randint(work.vocabulary, (work.batch, work.length + 1))
    return model, tokens[:, :-1], tokens[:, 1:]


def attention(device: torch.device, *, exact: bool = False) -> sdpa_kernel:
    """Return the context of the attention to use: flash, or the deterministic math version."""
    flash = SDPBackend.FLASH_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    return sdpa_kernel(SDPBackend.MATH if exact else flash)
