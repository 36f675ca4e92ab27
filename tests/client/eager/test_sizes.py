"""Batches of many lengths: steps of one signature, which follow one plan at any size."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import storm_client as storm
import torch
from storm_client.native import loader as native
from support.following import follow_by
from support.planning import replay_all
from support.tiny_llama import WORDS, tiny_llama
from support.training import assert_identical
from torch import Tensor, nn

STEPS, ROWS = 24, 2
LENGTHS = range(8, 48, 4)
AFTER = 12
"""Steps by which a plan is made and followed, if no length were new."""


class Experts(nn.Module):
    """Sends each token to one of some networks, by an index, and adds up what they make of it."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        made = torch.zeros_like(x)
        for expert, rows in zip(self.experts, order.tensor_split(len(self.experts)), strict=True):
            made = made.index_add(0, rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return self.head(made).logsumexp(-1).square().mean()


def llama() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model.train(), lambda model, tokens: model(input_ids=tokens, labels=tokens).loss


def experts() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    torch.manual_seed(0)
    return Experts(32, 3), lambda model, tokens: model(tokens)


MODELS = {"llama": llama, "experts": experts}


def trained(
    name: str,
    lengths: Sequence[int],
    block: Callable[[nn.Module], AbstractContextManager[object]] = lambda _: nullcontext(),
    each: Callable[[nn.Module], object] = lambda _: None,
) -> list[Tensor]:
    """Return the losses of a training, and the weights that it ends with."""
    model, loss_of = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context, found = block(model), []
    torch.manual_seed(5)
    for length in lengths:
        tokens = torch.randint(3, WORDS, (ROWS, length))
        with context:
            loss = loss_of(model, tokens)
        each(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize(("name", "path"), [("llama", "compiled"), ("experts", "python")])
def test_lengths_at_random_are_one_signature(
    name: str, path: str, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And steps are soon followed by compiled code, all of them, whatever length is new."""
    replay_all(monkeypatch)
    followed = follow_by(path, monkeypatch)
    lengths = random.Random(1).choices(LENGTHS[1:-1], k=STEPS)
    lengths += [LENGTHS[0], LENGTHS[-1], LENGTHS[-1] + 1, 12]  # beyond what was seen
    made: list[storm.Offload] = []

    def block(model: nn.Module) -> storm.Offload:
        made.append(client.offload(model, min_bytes=16))
        return made[0]

    expected = trained(name, lengths)
    assert_identical(trained(name, lengths, block), expected)
    signatures = made[0]._planning._signatures._known.values()
    assert {signature.seen for signature in signatures if signature.seen} == {len(lengths)}
    assert made[0].stats().replayed_bytes > 0
    if path == "compiled":
        assert all(followed[AFTER:])
        assert not followed.left


def test_a_budget_holds_in_steps_that_are_larger_than_it_knows(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = follow_by("compiled", monkeypatch)
    budget, kept = 100_000, []
    made: list[storm.Offload] = []

    def block(model: nn.Module) -> storm.Offload:
        made.append(client.offload(model, min_bytes=16, budget=budget, replay=False))
        return made[0]

    def note(model: nn.Module) -> None:
        follow = native.module()
        assert follow is not None
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        tokens = [one.token for one in follow.kept()]
        found = [one.untyped_storage() for one in tokens if one is not None]
        storages = {one.data_ptr(): one for one in found}
        large = (one.nbytes() for at, one in storages.items() if at not in weights)
        kept.append(sum(nbytes for nbytes in large if nbytes >= 16))

    lengths = [16] * 8 + [44, 44, 12, 16, 44]
    assert_identical(trained("llama", lengths, block, note), trained("llama", lengths))
    assert all(followed[7:])
    assert budget // 2 < max(kept[7:]) <= budget
    assert kept[8] < budget // 2, "nothing is known of steps that are so large"
    assert kept[9] > budget // 2


def test_sizes_about_the_least_that_is_handled_are_of_one_signature_soon(
    client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each step would do now more and now less than what compiled code expects."""
    replay_all(monkeypatch)
    followed = follow_by("compiled", monkeypatch)
    lengths = [44, 8, *random.Random(2).choices(LENGTHS, k=STEPS)]
    lengths.insert(8, 44)  # once more, since by now smaller tensors are handled
    block = lambda model: client.offload(model, min_bytes=4096)  # noqa: E731
    assert_identical(trained("llama", lengths, block), trained("llama", lengths))
    assert all(followed[AFTER + 4 :]), "what is handled has changed, and a plan is made once more"
