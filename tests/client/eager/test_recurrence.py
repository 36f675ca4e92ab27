"""Steps that no other is like are not learned, so that they cost no more than they have to."""

from __future__ import annotations

import signal
from contextlib import nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.eager.recognition import (
    KNOWN_KINDS,
    Recurrence,
    StepRecord,
    StepSignatures,
    behind_repeated,
)
from torch import nn


def seen(*steps: bool) -> bool:
    """Return whether it is worth learning, after steps of which some were new."""
    found = Recurrence()
    for is_new in steps:
        found.count_step(is_new=is_new)
    return found.is_seen


def test_a_few_new_steps_are_learned() -> None:
    assert seen()
    assert seen(True, True, True)
    assert not seen(True, True, True, True)


def test_steps_that_are_like_others_make_up_for_any_number_that_were_not() -> None:
    assert seen(*[True] * 1000, *[False] * 8)
    assert not seen(*[True] * 1000, *[False] * 7)
    assert seen(*[True] * 1000, *[False] * 8, True, True, True), "what is watched again is new"


@pytest.mark.parametrize("turns", ["a", "ab", "aab", "aaab", "aabb", "a" * 8 + "b" * 8, "abac"])
def test_turns_of_any_length_are_expected_once_they_were_taken(turns: str) -> None:
    steps = turns * 4
    for count in range(2 * len(turns), len(steps)):
        assert behind_repeated(steps[:count]) == steps[count]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64))


def trained(net: nn.Module, context: object, depths: list[int]) -> list[torch.Tensor]:
    found, x = [], torch.linspace(-1, 1, 64 * 256).view(256, 64)
    for depth in depths:
        net.zero_grad()
        with context:  # type: ignore[attr-defined]
            y = net(x)
            for _ in range(depth):
                y = y.sin() * y
            loss = y.square().mean()
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
    return found


NEW = list(range(3, 23))


def test_when_steps_come_again_they_are_learned_after_all(client: storm.Client) -> None:
    net = network()
    offload = client.offload(net, min_bytes=4096)
    depths = [*NEW, *[2] * 16]
    plain = trained(network(), nullcontext(), depths)
    assert all(map(torch.equal, plain, trained(net, offload, depths)))
    assert offload._planning._signatures.latest.has_functions
    assert offload.plan.bytes_by_decision["replay"] > 0


def around_others(net: nn.Module, context: object, counts: list[int]) -> list[torch.Tensor]:
    """Train steps in each of which other blocks, all of them unlike, are entered and left."""
    found, x = [], torch.linspace(-1, 1, 64 * 256).view(256, 64)
    for count in counts:
        net.zero_grad()
        with context:  # type: ignore[attr-defined]
            y = net(x)
            losses = [y.square().mean()]
            for depth in range(count):
                with context:  # type: ignore[attr-defined]
                    z = y.exp()
                    for _ in range(depth):
                        z = z.sin() * z
                    losses.append(z.mean())
        loss = sum(losses[1:], losses[0])
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]
    return found


def test_a_step_around_more_others_than_are_remembered_is_known_in_the_end(
    client: storm.Client,
) -> None:
    """Also where they show that smaller tensors are to be handled, and all is learned anew."""
    net = network()
    offload = client.offload(net, min_bytes=1024)
    counts = [0] * 4 + [KNOWN_KINDS + 1] * 3 + [0] * 3
    plain = around_others(network(), nullcontext(), counts)
    assert all(map(torch.equal, plain, around_others(net, offload, counts)))


class Signalling:
    """Equal to nothing; a signal arrives as it is compared."""

    def __eq__(self, other: object) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return False

    __hash__ = object.__hash__


@pytest.mark.timeout(60)
def test_a_signal_handler_may_ask_for_the_plan_at_any_moment() -> None:
    """It waited for ever for the thread that it had interrupted."""
    signatures, found = StepSignatures(), []
    step = StepRecord(signatures, None)
    step.record_event((torch.sin, 0, torch.float32, ()), 4)
    known = signatures.ended(step)
    before = signal.signal(signal.SIGUSR1, lambda *_: found.append(signatures.latest))
    try:
        signatures.begins_with([(Signalling(), 0, torch.float32, ())])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [known]
