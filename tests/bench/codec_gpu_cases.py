"""The tensors that the GPU codec and its peers are measured on, with what is asked of the codec.

What stays true: every codec of one run sees the same tensors, made once a case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One row: a tensor, how it is coded, and the goals (ratio, encode and decode in GB/s).

    `make` takes the tensor's size in bytes; cases on the same tensor share it.
    """

    name: str
    make: Callable[[int], torch.Tensor]
    speed: str = "fast"
    ratio: float = 0.0
    encode: float = 0.0
    decode: float = 0.0

    @property
    def tensor(self) -> str:
        """The row's name without the speed."""
        return self.name.removesuffix(" fast").removesuffix(" dense")


def normal(dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n // dtype.itemsize, device="cuda").to(dtype)


def relu(n: int) -> torch.Tensor:
    return torch.randn(n // 2, device="cuda").relu_().to(torch.bfloat16)


def mostly_zero(n: int) -> torch.Tensor:
    values = torch.randn(n // 2, device="cuda")
    return torch.where(values > 0.6744898, values, 0).to(torch.bfloat16)  # N(0, 1)'s upper quartile


def dropped_out(n: int) -> torch.Tensor:
    values = torch.randn(n // 2, device="cuda")
    return torch.where(torch.rand(n // 2, device="cuda") < 0.25, values, 0).to(torch.bfloat16)


def masked(n: int) -> torch.Tensor:
    """Half of the zeros are -0.0."""
    values = torch.randn(n // 2, device="cuda")
    return (values * (torch.rand(n // 2, device="cuda") < 0.25)).to(torch.bfloat16)


def mask(n: int) -> torch.Tensor:
    return torch.rand(n, device="cuda") < 0.1


def bf16_in_fp32(n: int) -> torch.Tensor:
    return torch.randn(n // 4, device="cuda").to(torch.bfloat16).float()


def noise(n: int) -> torch.Tensor:
    return torch.randint(0, 1 << 62, (n // 8,), device="cuda").mul_(2).view(torch.bfloat16)


BF16, FP16, FP32 = (normal(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32))

CASES = [
    Case("bf16 N(0,1) fast", BF16, "fast", 1.42, 1800, 2200),
    Case("bf16 N(0,1) dense", BF16, "dense", 1.48, 1000, 1500),
    Case("fp16 N(0,1) fast", FP16, "fast", 1.12, 1500, 1800),
    Case("fp16 N(0,1) dense", FP16, "dense", 1.16, 900, 1200),
    Case("fp32 N(0,1) fast", FP32, "fast", 1.17, 1500, 1800),
    Case("fp32 N(0,1) dense", FP32, "dense", 1.19, 900, 1200),
    Case("bf16 ReLU, 50% zeros", relu, "fast", 2.5, 1000, 1200),
    Case("bf16 no sign, 75% zeros", mostly_zero, "fast", 4.4, 1000, 1200),
    Case("bf16 signed, 75% zeros", dropped_out, "fast"),
    Case("bf16 75% zeros of either sign", masked, "fast", 3.6),
    Case("bool p = 0.1", mask, "fast", 7.99, 1500, 1500),
    Case("fp32 holding bf16", bf16_in_fp32, "fast", 2.8, 1500, 1500),
    Case("random bits", noise, "fast", 0.995),
]
