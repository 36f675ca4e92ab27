"""Ctrl-C while a step is captured: PyTorch's C++ code gets no exception where that ends it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from storm_client.step.interrupts import Interrupts
from storm_client.step.scalars import Number, Numbers


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def strike(done: list[str], times: int) -> list[str]:
    for number in range(times):
        signal.raise_signal(signal.SIGINT)
        done.append(f"after {number}")
    return done


def test_it_waits_for_a_function_and_a_second_one_does_not() -> None:
    interrupts, done = Interrupts(), list[str]()
    with interrupts.delayed():
        assert interrupts.run(strike, done, times=0) is done
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(interrupts.run, strike, done, times=1)
        assert done == ["after 0"]
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(strike, done, times=2)
        assert done == ["after 0", "after 0"]


def test_it_takes_effect_at_once_between_functions_and_after_a_capture() -> None:
    interrupts, done = Interrupts(), list[str]()
    with interrupts.delayed():
        interrupts.run(len, done)
        with pytest.raises(KeyboardInterrupt):
            strike(done, times=1)
    with pytest.raises(KeyboardInterrupt):
        interrupts.run(strike, done, times=1)
    assert not done


def test_what_pytorch_asks_of_a_number_runs_no_python_code() -> None:
    graph = torch.fx.Graph()
    number = Number(Numbers(graph, lambda _: None), graph.placeholder("x"), None)
    seen: list[str] = []

    def note(_frame: Any, event: str, _argument: Any) -> None:
        seen.append(event)

    sys.setprofile(note)
    try:
        answers = number.is_float(), number.is_bool(), number.is_int(), number.is_symbolic()
    finally:
        sys.setprofile(None)
    assert answers == (True, False, False, True)
    assert "call" not in seen
