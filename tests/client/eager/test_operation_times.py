"""How long operations take: which are run again, and what has to do where none can be."""

from __future__ import annotations

import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from storm_client import devices
from storm_client.eager import operation_times
from storm_client.eager.marks import Mark, Span
from storm_client.eager.operation_times import (
    LONG_SECONDS,
    OperationTimes,
)
from support.planning import Took
from support.waiting import wait_until

SHORT = LONG_SECONDS / 2
FREE = 1 << 30


class Event:
    """An event of a device on which an operation takes a microsecond."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: Event) -> float:
        return 1e-3


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand for a device whose tensors are the host's."""
    made = SimpleNamespace(
        Event=Event,
        device=lambda _: nullcontext(),
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        mem_get_info=lambda _: (made.free, FREE),
        memory_reserved=lambda _: 0,
        memory_allocated=lambda _: 0,
        _sleep=lambda _: None,
        free=FREE,
    )
    names = {name: getattr(torch, name) for name in ("Tensor", "nn", "empty_strided")}
    for module in (operation_times, devices):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=made, **names))
    monkeypatch.setattr(operation_times, "is_capturing", lambda _: False)
    return made


def took(times: OperationTimes, function: Any, *arguments: Any, seconds: float = SHORT) -> Any:
    made = function(*arguments)
    return times.of(function, arguments, {}, made, Took(seconds))


def test_events_are_let_go_of_once_they_are_known_though_nobody_plans(
    cuda: SimpleNamespace,
) -> None:
    """As where every step fails: nobody ever asks what its operations take."""
    cuda.free = 0
    times, one = OperationTimes(), torch.ones(8)
    spans = [Took((9 - number) * SHORT) for number in range(8)]
    held = [weakref.ref(span) for span in spans]
    while spans:
        timing = times.of(torch.sigmoid, (one,), {}, one, spans.pop(0))
    assert timing is not None
    assert [reference() is None for reference in held] == [True] * 7 + [False]
    assert timing() == 2 * SHORT


@pytest.mark.usefixtures("cuda")
def test_a_tensor_that_may_run_anything_is_not_looked_into() -> None:
    class Own(torch.Tensor):
        pass

    one = torch.ones(8).as_subclass(Own)
    assert took(OperationTimes(), torch.sigmoid, one)() == SHORT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_what_the_host_does_between_an_operations_events_is_not_counted() -> None:
    """As hooks do, which run inside of it."""
    device = torch.device("cuda", torch.cuda.current_device())
    times, source = OperationTimes(), torch.randn(4 << 20, device=device)

    def timed() -> tuple[Any, Span]:
        begin = Mark(device)
        wait_until(lambda: begin.is_reached)  # others may use the device
        time.sleep(LONG_SECONDS)
        made = torch.sigmoid(source)
        span = begin.until_now()
        return times.of(torch.sigmoid, (source,), {}, made, span), span

    timings, spans = zip(*[timed() for _ in range(5)], strict=True)
    torch.cuda.synchronize()
    assert {one() for one in timings} == {timings[0]()}
    assert 0.0 < timings[0]() < min(span() for span in spans) / 5


@pytest.mark.usefixtures("cuda")
def test_numbers_of_this_threads_operations_go_on_as_without() -> None:
    """A backward pass adds gradients up in their order, those of several threads as well."""
    matrix = torch.ones(8, 8, requires_grad=True)
    times = OperationTimes()
    timing = times.of(torch.mm, (matrix, matrix), {}, torch.mm(matrix, matrix), lambda: SHORT)
    assert timing is not None
    before = torch._C._autograd._get_sequence_nr()
    assert timing() == pytest.approx(1e-6)
    assert torch._C._autograd._get_sequence_nr() == before


def test_an_operation_on_sparse_tensors_is_not_told_apart() -> None:
    sparse, dense = torch.eye(8).to_sparse(), torch.ones(8, 8)
    times = OperationTimes()
    assert times.of(torch.mm, (sparse, dense), {}, torch.mm(sparse, dense)) is None
