"""choose.py: which mode each kind of tensor gets, and the ratios that make it worth having."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from storm_kernels import ancf
from storm_kernels.ancf.choose import Sample, choose, take_sample
from storm_kernels.ancf.dtypes import DType
from storm_kernels.ancf.layout import Mode

COUNT = 1 << 20


@pytest.fixture(scope="module")
def normal() -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def uniform() -> torch.Tensor:
    return torch.rand(COUNT, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("dtype", "speed", "ratio"),
    [
        (torch.bfloat16, "fast", 1.42),
        (torch.bfloat16, "dense", 1.48),
        (torch.float16, "fast", 1.12),
        (torch.float16, "dense", 1.16),
        (torch.float32, "fast", 1.17),
        (torch.float32, "dense", 1.19),
    ],
)
def test_normal_numbers(normal, dtype, speed, ratio):
    blob = ancf.encode(normal.to(dtype), speed=speed)
    assert blob.mode == "window"
    assert blob.ratio >= ratio


def test_half_zeros_without_sign(normal):
    blob = ancf.encode(normal.relu().bfloat16())
    assert blob.mode == "sparse"
    assert blob.ratio >= 2.5


def test_three_quarters_zeros(normal, uniform):
    signed = ancf.encode((normal * (uniform < 0.25)).bfloat16().add(0.0))
    positive = ancf.encode((normal - 0.6745).relu().bfloat16())
    assert signed.mode == positive.mode == "sparse"
    assert min(signed.ratio, positive.ratio) >= 4.4


def test_three_quarters_zeros_of_either_sign(normal, uniform):
    masked = (normal * (uniform < 0.25)).bfloat16()
    assert (masked.view(torch.int16) == -(2**15)).float().mean() > 0.37
    blob = ancf.encode(masked)
    assert blob.mode == "sparse"
    assert blob.ratio >= 3.6


@pytest.mark.parametrize(("negative", "apart"), [(0, False), (1, False), (2, True), (8, True)])
def test_signs_apart_have_to_cost_less_than_residues_of_zeros(normal, uniform, negative, apart):
    """A residue of bfloat16 is 8 bits: more than an eighth of the zeros has to be -0.0."""
    count = 1 << 14
    values = normal[:count].bfloat16().view(torch.int16).numpy().view("<u2").copy()
    zeros = np.flatnonzero(uniform[:count].numpy() < 0.5)
    values[zeros] = np.where(np.arange(zeros.size) % 10 < negative, 0x8000, 0)
    plan = choose(Sample(values, DType.BFLOAT16), Mode.SPARSE, dense=False, policy="adaptive")
    assert plan.keeps_signs_apart == apart


def test_boolean_mask(uniform):
    blob = ancf.encode((uniform < 0.1).repeat(2))
    assert blob.mode == "boolean"
    assert blob.ratio >= 7.99


def test_bfloat16_in_float32(normal):
    blob = ancf.encode(normal.bfloat16().float())
    assert blob.mode == "truncated"
    assert blob.ratio >= 2.8


def test_random_bits_grow_by_a_header(normal):
    noise = torch.randint(0, 256, (COUNT,), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64):
        blob = ancf.encode(noise.view(dtype))
        assert blob.mode == "raw"
        assert blob.nbytes == COUNT + 256


@pytest.mark.parametrize(
    ("tensor", "mode"),
    [
        (torch.zeros(0), "raw"),
        (torch.zeros(1000), "constant"),
        (torch.full((1000,), -0.0), "constant"),
        (torch.arange(5000) % 3 - 1.0, "ternary"),
        (torch.arange(5000) % 100, "integer"),
        (torch.arange(5000), "integer"),
        ((torch.arange(5000) % 50 == 0).long(), "integer"),
        ((torch.arange(50_000) % 100 == 0).float() * 0.3, "sparse"),
        (torch.arange(5000) % 2 == 0, "boolean"),
    ],
)
def test_modes(tensor, mode):
    assert ancf.encode(tensor).mode == mode


def test_joint_sign_where_it_pays(normal):
    plan = ancf.encode(normal.abs().bfloat16()).header.plan
    assert (plan.rotate, plan.residue_bits) == (0, 7)


def test_small_tensors_are_sampled_whole():
    elements = np.arange(16_384, dtype="<u2")
    assert take_sample(elements) is elements


@pytest.mark.parametrize("count", [16_385, 100_000, 10**6 + 1])
def test_larger_ones_are_sampled_in_even_runs(count):
    taken = take_sample(np.arange(count, dtype="<u4")).reshape(512, 32).astype(np.int64)
    assert (np.diff(taken, axis=1) == 1).all()
    assert (taken[:, 0] % 32 == 0).all()
    assert taken[0, 0] == 0
    assert count - 64 < taken[-1, -1] < count
    assert (np.diff(taken[:, 0]) > 0).all()


def test_dictionary_is_ordered_by_count_and_then_by_symbol():
    elements = np.repeat(np.array([9, 4, 7, 5], "<u2") << 7, [3, 5, 3, 1])
    plan = choose(Sample(elements, DType.BFLOAT16), Mode.WINDOW, dense=False, policy="adaptive")
    assert plan.rotate == 0  # all positive
    assert plan.dictionary == (4, 7, 9, 5)


@pytest.mark.parametrize(
    ("zeros", "bits"),
    [(0.0, (8, 9, 9)), (0.2, (8, 8, 9)), (0.6, (8, 7, 9)), (0.95, (7, 7, 9))],
)
def test_policies_of_mode_values(zeros, bits):
    elements = np.arange(1, 1001, dtype="<u2")
    elements[: int(zeros * 1000)] = 0
    sample = Sample(elements, DType.BFLOAT16)
    policies = ("conservative", "adaptive", "aggressive")
    assert bits == tuple(
        choose(sample, Mode.VALUES, dense=False, policy=policy).k1 for policy in policies
    )
