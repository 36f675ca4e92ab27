"""At which sizes something is proved, and what a failed trial is the fault of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import storm_client as storm
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_client.eager.events import RecordedValue
from storm_client.eager.followed_plan import FollowedPlan
from storm_client.eager.proofs import ENOUGH_SIZES, Proofs, Trial
from storm_client.eager.signature import StepSignature
from storm_client.planner.decisions import Replay
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


@pytest.mark.parametrize("fails_first", [False, True])
def test_a_value_that_is_the_same_at_times_only_is_rejected(fails_first: bool) -> None:
    """Of two backward passes through one step, the second may meet an uncounted write."""
    values = [RecordedValue(0, 16, torch.float32, torch.Size([4]), operation="mul")]
    signature = StepSignature((), values)
    plan = FollowedPlan((), values, [Replay()], logged=[])
    trial, evidence = Trial(signature, 0, plan, 16), signature.evidence
    if fails_first:
        trial.fail("other bits")
        trial.succeed()
    else:
        trial.succeed()
        trial.fail("other bits")
    assert "at times" in evidence.rejected[0]
    assert signature.is_outdated


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


@pytest.mark.parametrize(
    ("proved", "failed", "rejected"),
    [
        ((0, 1), (2, 3), {2}),
        ((0, 1), (3,), {3}),  # 2 was not asked for: nothing explains the failure
        ((), (2, 3), {2, 3}),
        ((0, 1, 2, 3), (2, 3), {2, 3}),
        ((0, 1), (2, 3, 4), {2, 4}),  # 4 is made from none of them
        ((1, 2), (3, 4), {3, 4}),
    ],
)
def test_a_failure_is_the_fault_of_what_is_proved_up_to_there(
    proved: tuple[int, ...], failed: tuple[int, ...], rejected: set[int]
) -> None:
    """Each value is made from the one before it, but 4 from what no step recomputes."""
    values = [
        RecordedValue(
            n, 8, torch.float32, torch.Size([2]), inputs=() if n == 4 else (n - 1,), uses=1
        )
        for n in range(5)
    ]
    signature = StepSignature((), values)
    plan = FollowedPlan((), values, [Replay()] * 5, logged=[])
    for number in proved:
        Trial(signature, number, plan, 8).succeed()
    for number in failed:
        Trial(signature, number, plan, 8).fail("changed")
    signature.evidence.settle()
    assert signature.evidence.rejected.keys() == rejected
    assert not signature.evidence.failed
