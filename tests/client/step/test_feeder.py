"""Feeder: ahead, in order, bounded, and gone when the loop is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.errors import UsageError
from storm_client.step import turns
from support.forking import status_of_child
from support.waiting import wait_until

SECONDS = 60.0


def feeders() -> int:
    return sum(thread.name == "storm-feeder" for thread in threading.enumerate())


def test_items_come_in_order_and_on_the_device(device: str) -> None:
    data = [{"x": torch.full((4,), n), "names": ["a", n]} for n in range(5)]
    found = list(storm.Feeder(data, device=device))
    assert [item["names"] for item in found] == [["a", n] for n in range(5)]
    for number, item in enumerate(found):
        assert item["x"].device.type == device
        assert item["x"].tolist() == [number] * 4


@pytest.mark.parametrize("place", ["memory", "pinned memory", "device", "array"])
def test_an_iterable_may_reuse_its_buffer(place: str, device: str) -> None:
    if place == "pinned memory" and device == "cpu":
        pytest.skip("nothing is pinned for a CPU")
    made: list[int] = []

    def source() -> Iterator[dict[str, Any]]:
        buffer = torch.empty(1 << 16, pin_memory=place == "pinned memory")
        buffer = buffer.to(device if place == "device" else "cpu")
        for number in range(6):
            made.append(number)
            buffer.fill_(number)
            held = buffer.numpy() if place == "array" else buffer
            yield {"x": held, "same": held}

    with storm.Feeder(source(), device=device, ahead=2) as feeder:
        for number, item in enumerate(feeder):
            wait_until(lambda least=number: len(made) >= min(6, least + 4), SECONDS)
            assert item["x"].tolist() == [number] * (1 << 16)
            assert item["same"] is item["x"]


def test_it_is_ahead_by_so_many_items(device: str) -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    with storm.Feeder(source(), device=device, ahead=3) as feeder:
        items = iter(feeder)
        assert next(items) == 0
        wait_until(lambda: len(made) == 5, SECONDS)  # one consumed, three wait, one wants to
        assert next(items) == 1
        wait_until(lambda: len(made) == 6, SECONDS)


def test_an_exception_comes_at_its_item() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("third")

    items = iter(storm.Feeder(source(), device="cpu"))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(KeyError, match="third"):
        next(items)
    assert not feeders()


def test_leaving_the_loop_early_ends_the_iterable_too() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            ended.set()

    for item in storm.Feeder(source(), device="cpu"):
        if item == 3:
            break
    wait_until(lambda: ended.is_set() and not feeders(), SECONDS)


def test_a_feeder_is_used_once_and_ends_its_loop_when_it_is_closed() -> None:
    feeder = storm.Feeder([1], device="cpu")
    assert list(feeder) == [1]
    with pytest.raises(storm.UsageError, match="once"):
        iter(feeder)
    feeder.close()
    feeder = storm.Feeder(iter(range(100)), device="cpu")
    items = iter(feeder)
    next(items)
    feeder.close()
    assert list(items) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [*(({"ahead": ahead}, "ahead is") for ahead in (0, 1.5, None)), ({"device": "xyz"}, "'xyz'")],
)
def test_bad_values_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(storm.UsageError, match=named):
        storm.Feeder([], **options)


def test_a_process_that_was_forked_does_not_wait_for_items() -> None:
    feeder = storm.Feeder(range(1 << 30), ahead=1)
    items = iter(feeder)
    next(items)

    def take() -> None:
        with pytest.raises(UsageError, match="was forked since"):
            list(items)

    with feeder:
        assert status_of_child(take) == 0


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_capture_waits_for_no_item_that_waits_for_it(
    is_nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own thread, or one that is made of another Feeder's items: that would never end."""
    monkeypatch.setattr(turns, "WAIT_SECONDS", 1e9)
    step = storm.compile_step(lambda x: x * 2, codegen="eager")

    def items() -> Iterator[torch.Tensor]:
        if is_nested:
            with storm.Feeder([torch.ones(2)] * 8, device="cpu", ahead=1) as inner:
                numbers = iter(inner)
                for _ in range(2):
                    yield sum(next(numbers) for _ in range(4))
        else:
            for _ in range(2):
                yield step(torch.full((2,), 2.0))

    with storm.Feeder(items(), device="cpu", ahead=1) as feeder:
        assert [step(x).tolist() for x in feeder] == [[8.0, 8.0]] * 2
