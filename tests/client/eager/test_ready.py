"""Values that are read as soon as they have been made: what leaves later has the same bits.

On a GPU the daemon reads them then. On a CPU a copy is taken, and put in their place when they
leave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client import hooks as packing
from storm_client.eager import early_reads
from storm_client.planner import in_flight as window
from storm_client.planner.in_flight import DeviceWindow
from storm_client.saved.ranges import StoredRange
from storm_client.transport.stores import Stores
from storm_client.transport.transfer import Outgoing
from support.following import follow_by
from support.planning import offload_products
from support.random_programs import run
from support.training import assert_identical, seeded
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

STEPS = 6


@dataclass
class Reader:
    """Reads what was made behind the function that made it, and not when it leaves."""

    copies: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    """The numbers by which stores were read."""

    def publish(self, tensor: Tensor) -> int:
        number = len(self.copies) + 1
        self.copies[number] = tensor.untyped_storage().clone()
        return number

    def begin_store(self, stores: Stores, record: StoredRange) -> Outgoing:
        out = BEGIN_STORE(stores, record)
        if out.ready:
            self.used.append(out.ready)
        if out.ready in self.copies:
            record.source.copy_(self.copies[out.ready])
        return out


BEGIN_STORE = Stores.begin_store


@pytest.fixture
def reader(device: str, monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader()
    follow_by("python", monkeypatch)  # small results leave together where compiled code follows
    offload_products(monkeypatch)
    monkeypatch.setattr(early_reads, "LARGE_BYTES", 0)
    monkeypatch.setattr(window, "MIN_BYTES", 0)  # so that all leaves
    monkeypatch.setattr(DeviceWindow, "record_store", lambda _window, _nbytes: None)
    monkeypatch.setattr(
        Stores,
        "begin_store",
        lambda *args: reader.begin_store(*args),  # noqa: PLW0108 - no method of Stores
    )
    if device == "cpu":
        publish = lambda _hooks, tensor: reader.publish(tensor)  # noqa: E731
        monkeypatch.setattr(packing.StepHooks, "_publish_ready", publish)
    return reader


Forward = Callable[[Tensor, Tensor], Tensor]


def train(forward: Forward, device: str, offload: Any) -> list[Tensor]:
    weight, x = (nn.Parameter(seeded(device, 64, 64, seed=n)) for n in range(2))
    with offload:
        loss = forward(x, weight).square().mean()
    loss.backward()
    return [loss.detach(), weight.grad, x.grad]


def chain(
    x: Tensor, weight: Tensor, spoil: Callable[[Tensor], object] = lambda _made: None
) -> Tensor:
    """Make products whose results are saved where `spoil` has had them in its hands."""
    for _ in range(3):
        made = linear(x, weight)
        spoil(made)
        x = silu(made) * 2.0
    return x


def assert_identical_steps(forward: Forward, device: str, offload: storm.Offload) -> None:
    expected = train(forward, device, nullcontext())
    for _ in range(STEPS):
        assert_identical(train(forward, device, offload), expected)


def attend(x: Tensor, weight: Tensor, spoil: Callable[[Tensor], object]) -> Tensor:
    """Save the results of attention, which does so itself, and then as what a product reads."""
    for _ in range(3):
        heads = linear(x, weight).view(4, 16, 4, 16).transpose(1, 2)
        made = scaled_dot_product_attention(heads, heads, heads)
        spoil(made)
        x = silu(linear(made.transpose(1, 2).reshape(64, 64), weight)) * 2.0
    return x


def doubled(made: Tensor) -> Tensor:
    """Write to it by what no version counts."""
    return made.data.mul_(2.0)


CASES: dict[str, tuple[Forward, dict[str, Any], bool | None]] = {
    "made": (chain, {}, True),
    "written to uncounted": (lambda x, w: chain(x, w, doubled), {}, False),
    "changed before it is saved": (
        lambda x, w: chain(x, w, lambda made: made.fmod_(1.0)),
        {},
        False,
    ),
    "verified in each step": (chain, {"verify": "always"}, False),
    "saved by its function": (lambda x, w: attend(x, w, lambda _made: None), {}, True),
    "saved by its function and written to": (lambda x, w: attend(x, w, doubled), {}, None),
}
"""What is made, and whether it is read before it leaves."""


@pytest.mark.parametrize("name", CASES)
def test_what_has_been_made_is_read_before_it_leaves_if_it_stays_as_it_is(
    name: str, device: str, reader: Reader, client: storm.Client
) -> None:
    forward, options, is_read = CASES[name]
    assert_identical_steps(forward, device, client.offload(min_bytes=1, **options))
    if is_read is not None:
        assert bool(reader.used) is is_read
    if name == "made":
        assert len(reader.used) >= 3 * (STEPS - 2)  # not while steps are learned and tried


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("is_saved_before", [False, True])
def test_what_changes_before_it_is_saved_in_a_later_step(
    is_saved_before: bool, is_held: bool, device: str, reader: Reader, client: storm.Client
) -> None:
    """In one that is like others until then; or it is saved again at a later version."""
    held: list[Tensor] = []
    changes = False

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        made = linear(x, weight)
        # No gradient comes to the activation, but what it has saved lives.
        held[:] = [made] * is_held + [silu(made)] * is_saved_before
        if changes:
            with torch.no_grad():
                made.mul_(3.0)
        return silu(made) * 2.0

    offload = client.offload(min_bytes=1)
    assert_identical_steps(forward, device, offload)
    assert reader.used
    changes = True
    assert_identical_steps(forward, device, offload)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int, device: str, reader: Reader, client: storm.Client) -> None:
    offload = client.offload(min_bytes=1)
    expected = run(seed, device, nullcontext)
    for _ in range(STEPS):
        assert_identical(run(seed, device, lambda: offload), expected)
