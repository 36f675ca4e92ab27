"""At which sizes something is proved, and in which ways values are recomputed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import storm_client as storm
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.eager.proofs import ENOUGH_SIZES, Proofs
from support.planning import replay_all
from torch import Tensor

Step = Callable[[AbstractContextManager[object], Tensor], Tensor]


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 10))
def test_three_sizes_prove_all_between(compared: list[int], nbytes: int) -> None:
    proofs = Proofs()
    for one in compared:
        proofs.add("this", one)
    if len(set(compared)) < ENOUGH_SIZES:
        assert proofs.holds("this", nbytes) == (nbytes in compared)
        assert proofs.sizes("this") == tuple(sorted(set(compared)))
    else:
        assert proofs.holds("this", nbytes) == (min(compared) <= nbytes <= max(compared))
    assert not proofs.holds("another", nbytes)


def test_a_step_that_goes_on_otherwise_proves_nothing(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins alike, but what the other step changes uncounted it leaves as it is."""
    replay_all(monkeypatch)
    factor = torch.linspace(1, 2, 256)

    def changing(block: AbstractContextManager[object], x: Tensor) -> Tensor:
        with block:
            doubled = x * factor
            loss = doubled.sin().sum()
            doubled.data.add_(1)
        return loss

    def longer(block: AbstractContextManager[object], x: Tensor) -> Tensor:
        with block:
            return (x * factor).sin().cos().sum()

    def gradient(step: Step, block: AbstractContextManager[object]) -> Tensor:
        x = torch.linspace(-1, 1, 256).requires_grad_()
        step(block, x).backward()
        assert x.grad is not None
        return x.grad

    offload = client.offload(min_bytes=1)
    for step in (changing, longer, changing, longer, changing):
        assert torch.equal(gradient(step, offload), gradient(step, nullcontext()))
