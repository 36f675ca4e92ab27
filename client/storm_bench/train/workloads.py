"""The workloads of `stormd bench train`: models, and the tokens of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from storm_bench.train.gpt import Gpt, Workload
from storm_bench.train.llama import Llama, LlamaWorkload

__all__ = ["WORKLOADS", "Net", "Training", "make", "plain_loss"]

WORKLOADS: Final[dict[str, Workload | LlamaWorkload]] = {
    "W0": Workload(256, 4, 2, 1024, vocabulary=1000, head=64),
    "W1": Workload(4096, 8, 2, 4096),
    "W2": Workload(8192, 4, 1, 4096),
    "W3": Workload(4096, 4, 1, 32768),
    "llama": LlamaWorkload(8, 2, 4096),
    "llama-long": LlamaWorkload(4, 1, 32768),
    "llama-lora": LlamaWorkload(8, 2, 4096, rank=16),
    "llama-small": LlamaWorkload(12, 8, 512, width=1024, hidden=2816, heads=16, groups=16),
}
"""W0 is for machines without a GPU, and to try the benchmark out."""


class Net(Protocol):
    """A model in three parts: the part before its blocks, the blocks, and the part after them."""

    @property
    def blocks(self) -> Iterable[Callable[[Tensor], Tensor]]:
        """Functions of [batch, length, width] to the same."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the first block's input for int64 [batch, length]."""
        ...

    def logits(self, x: Tensor) -> Tensor:
        """Return the head's output for the last block's output, in the model's dtype."""
        ...


def plain_loss(net: Net, x: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the last block's output, with logits in float32."""
    logits = net.logits(x).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Training:
    """A model in bfloat16, and a step's tokens and targets, int64 [batch, length]."""

    net: Net
    module: nn.Module
    """The same model as `net`."""
    tokens: Tensor
    targets: Tensor
    optimizer: torch.optim.Optimizer | None
    """If set, its step is part of a training step; else gradients are dropped."""


def make(work: Workload | LlamaWorkload, device: torch.device) -> Training:
    """Return the model and the tokens of a workload, with seeded random weights.

    Raises:
        ImportError: a package that the model needs is not installed.
    """
    torch.manual_seed(0)
    optimizer: torch.optim.Optimizer | None = None
    with torch.device(device):
        net = Gpt(work) if isinstance(work, Workload) else Llama(work)
        net.to(torch.bfloat16)
        tokens = torch.randint(work.vocabulary, (work.batch, work.length + 1))
    if isinstance(work, LlamaWorkload):
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    return Training(net, net, tokens[:, :-1], tokens[:, 1:], optimizer)
