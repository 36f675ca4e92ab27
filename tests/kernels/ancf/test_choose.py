"""choose.py: which mode each kind of tensor gets, and the ratios that make it worth having."""

from __future__ import annotations

import torch
from storm_kernels import ancf

COUNT = 1 << 18


def test_modes_and_ratios():
    normal = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(COUNT, generator=torch.Generator().manual_seed(1))
    masked = (normal * (uniform < 0.25)).bfloat16()  # zeros of either sign
    missed = torch.zeros(100_000).index_fill_(0, torch.tensor([50]), 1.0)  # not in the sample
    for tensor, speed, mode, ratio in (
        (normal.bfloat16(), "fast", "window", 1.42),
        (normal.bfloat16(), "dense", "window", 1.48),
        (normal.half(), "fast", "window", 1.12),
        (normal.half(), "dense", "window", 1.16),
        (normal, "fast", "window", 1.17),
        (normal, "dense", "window", 1.19),
        (normal.relu().bfloat16(), "fast", "sparse", 2.5),
        (masked.add(0.0), "fast", "sparse", 4.4),
        ((normal - 0.6745).relu().bfloat16(), "fast", "sparse", 4.4),
        (masked, "fast", "sparse", 3.6),
        ((uniform < 0.1).repeat(8), "fast", "boolean", 7.99),
        (normal.bfloat16().float(), "fast", "truncated", 2.8),
        (torch.zeros(0), "fast", "raw", 0),
        (torch.zeros(1000), "fast", "constant", 1),
        (torch.full((1000,), -0.0), "fast", "constant", 1),
        (torch.arange(5000) % 3 - 1.0, "fast", "ternary", 1),
        (torch.arange(5000) % 100, "fast", "integer", 1),
        (torch.arange(5000), "fast", "integer", 1),
        ((torch.arange(5000) % 50 == 0).long(), "fast", "integer", 1),
        ((torch.arange(50_000) % 100 == 0).float() * 0.3, "fast", "sparse", 1),
        (torch.arange(5000) % 2 == 0, "fast", "boolean", 1),
        (missed, "fast", "sparse", 1),
    ):
        blob = ancf.encode(tensor, speed=speed)
        assert blob.mode == mode, (tensor, speed)
        assert blob.ratio >= ratio, (tensor, speed)


def test_random_bits_grow_by_a_header():
    noise = torch.randint(0, 256, (COUNT,), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64):
        blob = ancf.encode(noise.view(dtype))
        assert blob.mode == "raw"
        assert blob.nbytes == COUNT + 256
