"""Inductor's code around the operators: nothing is copied, and kernels are as without offload."""

from __future__ import annotations

import pytest
import storm_client as storm
import torch
from support.compiled_programs import perceptron
from support.training import seeded
from torch._inductor.utils import run_and_get_code


@pytest.fixture
def code(client: storm.Client) -> tuple[str, str]:
    """What is generated for the forward and the backward pass of a perceptron."""
    torch._dynamo.reset()
    call = storm.compile(perceptron("cpu"), client=client, min_bytes=1, budget=0.0)
    _, found = run_and_get_code(lambda: call(seeded("cpu", 16, 32)).square().mean().backward())
    torch._dynamo.reset()
    forward, backward = found
    return forward, backward


def test_what_is_stored_is_not_copied(code: tuple[str, str]) -> None:
    """A kernel would write it twice, once for the store and once for what comes next."""
    assert "stormd.store" in code[0]
    assert "out_ptr1" not in code[0]


def test_what_comes_back_counts_as_aligned(code: tuple[str, str]) -> None:
    """Kernels for other memory may add in another order."""
    assert "stormd.wait" in code[1]
    doubted = [line for line in code[1].splitlines() if "assumed to be not aligned" in line]
    assert not [line for line in doubted if "stormd.wait" in line]
