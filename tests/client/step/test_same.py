"""A step that does something else in each call, for no reason that is compared, is refused."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from operator import getitem
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step.compiled import CompiledStep
from support.training import assert_identical, seeded
from torch import Tensor, nn

Wrap = Callable[..., CompiledStep]

COUNT = itertools.count(2)
MANY = SimpleQueue[float]()
for _number in range(1, 9):
    MANY.put(float(_number))


def read(folder: Path) -> float:
    file = folder / "scale"
    scale = float(file.read_text()) if file.exists() else 1.0
    file.write_text(str(scale + 1))
    return scale


UNSEEN: dict[str, Callable[[Path], float]] = {
    "an iterator of a helper's": lambda _: float(next(COUNT)),
    "a queue": lambda _: MANY.get(),
    "a clock": lambda _: time.perf_counter(),
    "a file": read,
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_differs_at_each_call_is_refused_before_it_is_wrong(
    name: str, wrap: Wrap, tmp_path: Path
) -> None:
    used: list[float] = []
    scale = UNSEEN[name]

    def step(x: Tensor) -> Tensor:
        return x * scale(tmp_path)

    call = wrap(step)
    with pytest.raises(UsageError, match=r"not do the same in each call \(aten.mul.Tensor"):
        used.extend(float(call(torch.ones(1))) for _ in range(3))
    assert len(set(used)) == len(used) > 1


def test_each_capture_is_confirmed_before_it_runs_again(wrap: Wrap) -> None:
    """Also that of a branch which is taken only after another capture was confirmed."""
    used: list[float] = []
    read_next = UNSEEN["an iterator of a helper's"]
    call = wrap(lambda x, is_late: x * read_next(Path()) if is_late else x * 2.0)
    for _ in range(4):
        assert float(call(torch.ones(1), False)) == 2.0
    with pytest.raises(UsageError, match=r"not do the same in each call \(aten.mul.Tensor"):
        used.extend(float(call(torch.ones(1), True)) for _ in range(3))
    assert len(set(used)) == len(used) > 1


def test_what_only_a_first_call_does_differently_is_not_refused(wrap: Wrap, tmp_path: Path) -> None:
    file = tmp_path / "begun"

    def step(x: Tensor) -> Tensor:
        scale = 1.0 if file.exists() else 2.0
        file.touch()
        return x * scale

    call, x = wrap(step), seeded("cpu", 4)
    for expected in (2.0, 1.0, 1.0, 1.0):
        assert_identical([call(x)], [x * expected])


ASKED: dict[str, Callable[[Path, int], float]] = {
    "a file": lambda folder, _: 2.0 if (folder / "late").exists() else 1.0,
    "a clock": lambda *_: 2.0 if time.monotonic() < 0 else 1.0,
    "an iterator of a helper's": lambda _, turn: float(next(COUNT) > 0) * turn,
}


@pytest.mark.parametrize("name", ASKED)
def test_a_step_that_asks_what_nothing_tells_runs_its_code_in_each_call(
    name: str, wrap: Wrap, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = SimpleQueue[int]()

    def ask() -> float:
        runs.put(1)
        return ASKED[name](tmp_path, 1)

    call, x = wrap(lambda x: x * ask()), seeded("cpu", 4)
    for number in range(5):
        assert_identical([call(x)], [x * ASKED[name](tmp_path, 1)])
        assert runs.qsize() == number + 1
        if number == 2:
            (tmp_path / "late").touch()
    [message] = caplog.messages
    assert "is captured again at each call, because it asks" in message


@pytest.mark.parametrize("make", [object, lambda: lambda: 1])
def test_each_call_may_return_another_object(make: Callable[[], object], wrap: Wrap) -> None:
    call, x = wrap(lambda x: (x * 2, make())), seeded("cpu", 4)
    for _ in range(4):
        found, made = call(x)
        assert_identical([found], [x * 2])
        assert type(made) is type(make())


MADE_ANEW: dict[str, Callable[[], Tensor]] = {
    r"a constant tensor\(": lambda: torch.tensor(time.perf_counter(), dtype=torch.float64),
    "a constant <torch._C.Generator": lambda: torch.rand(1, generator=torch.Generator()),
}


@pytest.mark.parametrize("text", MADE_ANEW)
def test_a_constant_that_each_call_makes_anew_is_told(text: str, wrap: Wrap) -> None:
    call = wrap(lambda x: x * MADE_ANEW[text]())
    call(torch.ones(1))
    call(torch.ones(1))
    with pytest.raises(UsageError, match=rf"not do the same in each call \({text}"):
        call(torch.ones(1))


@lru_cache
def noise(count: int) -> tuple[Tensor, int]:
    return torch.randn(count), count


def test_a_cache_gets_nothing_of_a_capture_and_may_be_filled_before(
    client: storm.Client,
) -> None:
    noise.cache_clear()
    call = storm.compile_step(lambda x: x * noise(4)[0], client=client, codegen="eager")
    x = seeded("cpu", 4)
    with pytest.raises(UsageError, match=r"the cache of noise, .*before the first step"):
        call(x)
    assert type(noise(4)[0]) is Tensor
    for _ in range(3):
        assert_identical([call(x)], [x * noise(4)[0]])


def test_nothing_holds_a_tensor_of_a_capture_wherever_it_is(wrap: Wrap) -> None:
    held: list[Tensor] = []
    kept = weakref.WeakValueDictionary({1: (owner := Owner())})
    owner.keep = held.append

    def step(x: Tensor) -> Tensor:
        kept[1].keep(x * 2)
        return x

    with pytest.raises(UsageError, match="leaves a tensor that it computes in a list"):
        wrap(step)(seeded("cpu", 4))


class Owner:
    keep: Callable[[Tensor], None]


class Bound(nn.Module):
    """Reads numbers where no attribute or variable of Python's leads to them."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {"scale": 1.0}
        self.cached = lru_cache(lambda: self.held["scale"])
        self.ways: dict[str, Callable[[], float]] = {
            "a partial": partial(dict.get, self.held, "scale"),
            "a method of C's": partial(self.held.get, "scale"),
            "a proxy": partial(getitem, MappingProxyType(self.held), "scale"),
            "a default": by_default(self.held),
            "an attribute of a function": by_attribute(self.held),
            "a cache": self.cached,
        }

    def forward(self, x: Tensor) -> Tensor:
        return x

    def change(self, scale: float) -> None:
        self.held["scale"] = scale
        self.cached.cache_clear()
        self.cached()


def by_default(held: dict[str, float]) -> Callable[[], float]:
    return lambda known=held: known["scale"]  # type: ignore[misc]


def by_attribute(held: dict[str, float]) -> Callable[[], float]:
    def read() -> float:
        return float(read.held["scale"])  # type: ignore[attr-defined]

    read.held = held  # type: ignore[attr-defined]
    return read


@pytest.mark.parametrize("name", Bound().ways)
def test_what_c_code_has_bound_takes_effect_when_it_changes_later(name: str, wrap: Wrap) -> None:
    bound = Bound()
    bound.change(1.0)
    way = bound.ways[name]
    call, x = wrap(lambda x: x * way()), seeded("cpu", 4)
    for scale in (1.0, 1.0, 1.0, 3.0):  # it changes once captures are confirmed
        if scale != bound.held["scale"]:
            bound.change(scale)
        assert_identical([call(x)], [x * scale])


def test_a_forward_that_is_replaced_takes_effect(
    wrap: Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, x = Bound(), seeded("cpu", 4)
    call = wrap(lambda x: bound(x) + 0)
    for _ in range(3):
        assert_identical([call(x)], [x])
    monkeypatch.setattr(Bound, "forward", lambda _, x: x * 2)
    assert_identical([call(x)], [x * 2 + 0])


def test_a_list_that_a_called_function_alone_extends_is_named(wrap: Wrap) -> None:
    calls: list[int] = []

    def count() -> None:
        calls.append(1)

    def step(x: Tensor) -> Tensor:
        count()
        return x * 2

    call, x = wrap(step), seeded("cpu", 4)
    call(x)
    with pytest.raises(UsageError, match="calls again and again"):
        call(x)
