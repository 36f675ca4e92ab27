"""Receiver: in order, on the host, with errors where somebody sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from support.forking import status_of_child
from support.waiting import wait_until

SECONDS = 60.0


def test_results_come_in_order_on_the_host(device: str) -> None:
    found = []

    def note(step: int, loss: torch.Tensor, *, more: dict[str, torch.Tensor]) -> None:
        assert threading.current_thread().name == "storm-receiver"
        assert loss.device.type == more["g"].device.type == "cpu"
        assert not loss.requires_grad
        found.append((step, loss.item(), more["g"].tolist()))

    with storm.Receiver(note) as receive:
        for step in range(20):
            loss = torch.full((), float(step), device=device, requires_grad=True)
            receive(step, loss * 2, more={"g": torch.tensor([step], device=device)})
    assert found == [(step, 2.0 * step, [step]) for step in range(20)]


def test_what_is_changed_after_the_call_is_not_seen(device: str) -> None:
    found: list[float] = []
    begin = threading.Event()

    def note(value: torch.Tensor) -> None:
        begin.wait(SECONDS)
        found.append(value.item())

    with storm.Receiver(note) as receive:
        total = torch.zeros((), device=device)
        for _ in range(3):
            total += 1
            receive(total)
        begin.set()
    assert found == [1, 2, 3]


def test_an_error_comes_at_the_next_call() -> None:
    called = threading.Event()

    def note(value: int) -> None:
        called.set()
        raise ValueError(f"no {value}")

    receive = storm.Receiver(note)
    receive(1)
    wait_until(lambda: receive._error is not None, SECONDS)
    with pytest.raises(ValueError, match="no 1"):
        receive(2)
    receive.close()


def test_an_error_comes_at_close_but_not_in_the_place_of_the_block_s_own() -> None:
    with pytest.raises(ZeroDivisionError), storm.Receiver(lambda value: 1 / value) as receive:
        receive(0)
    receive = storm.Receiver(lambda value: 1 / value)
    receive(0)
    receive.__exit__(KeyError, KeyError(), None)


def test_after_an_error_nobody_blocks_and_nothing_is_called() -> None:
    found: list[int] = []

    def note(value: int) -> None:
        found.append(value)
        raise ValueError

    receive = storm.Receiver(note, waiting=1)
    receive(0)
    for number in range(1, 10):
        try:
            receive(number)
        except ValueError:
            continue
    receive.close()
    assert found == [0]


def test_a_closed_receiver_takes_nothing() -> None:
    receive = storm.Receiver(print)
    receive.close()
    receive.close()
    with pytest.raises(storm.UsageError, match="closed"):
        receive(1)


def test_a_callback_may_send_where_there_is_room() -> None:
    found: list[int] = []
    sent = threading.Event()

    def call(number: int) -> None:
        found.append(number)
        if number < 3:
            receiver(number + 1)
        else:
            sent.set()

    with storm.Receiver(call, waiting=1) as receiver:
        receiver(0)
        assert sent.wait(SECONDS)
    assert found == [0, 1, 2, 3]


def test_a_callback_that_would_wait_for_itself_raises() -> None:
    begun, full, refused = threading.Event(), threading.Event(), threading.Event()

    def call(number: int) -> None:
        begun.set()
        assert full.wait(SECONDS)
        try:
            receiver(number)
        finally:
            refused.set()

    receiver = storm.Receiver(call, waiting=1)
    receiver(0)
    assert begun.wait(SECONDS)
    receiver(1)
    full.set()
    assert refused.wait(SECONDS)
    with pytest.raises(storm.UsageError, match="sends to its own Receiver while 1 calls wait"):
        receiver.close()


def test_a_callback_cannot_close_its_receiver() -> None:
    def call() -> None:
        receiver.close()

    receiver = storm.Receiver(call)
    receiver()
    with pytest.raises(storm.UsageError, match="closed by its own callback"):
        receiver.close()


@pytest.mark.parametrize(
    ("callback", "waiting", "message"),
    [(None, 1, "callback is"), (print, 0, "waiting is"), (print, 1.0, "waiting is")],
)
def test_what_is_asked_wrongly_is_named(callback: object, waiting: object, message: str) -> None:
    with pytest.raises(storm.UsageError, match=message):
        storm.Receiver(callback, waiting=waiting)


def test_a_process_that_was_forked_does_not_wait_for_room() -> None:
    def send() -> None:
        with pytest.raises(UsageError, match="was forked since"):
            receive(2)
        receive.close()

    with storm.Receiver(float, waiting=1) as receive:
        receive(1)
        assert status_of_child(send) == 0


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_what_a_transform_computes_with_is_refused(transform: Callable[..., Any]) -> None:
    with storm.Receiver(float) as receive:

        def function(x: torch.Tensor) -> torch.Tensor:
            receive(x)
            return x.sum()

        with pytest.raises(UsageError, match=r"within torch.func"):
            transform(function)(torch.ones(3))
