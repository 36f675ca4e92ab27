"""For how long the device computes in a forward pass, by what its operations take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from storm_client.eager.events import RecordedValue
from storm_client.eager.operations import byproduct_of
from storm_client.eager.plan_maker import _busy_seconds, planned_values

LONG = 9.0
"""What a pass seemed to take that has waited."""


def value(number: int, operation: str, *inputs: int, **others: Any) -> RecordedValue:
    """Return one whose operation takes 0.1 s and as much again for each number before it."""
    shape = torch.Size([1 + number])  # alike are none
    timing = lambda: 0.1 * (1 + number)  # noqa: E731
    known = {"operation": operation, "inputs": inputs, "timing": timing}
    return RecordedValue(number, 400, torch.float32, shape, **known, **others)


def seconds(*events: tuple[Any, RecordedValue], is_on_gpu: bool = True) -> float | None:
    values = [value for _, value in events]
    signature: Any = SimpleNamespace(
        is_on_gpu=is_on_gpu,
        clock=None,
        times=SimpleNamespace(busy_seconds=lambda: LONG),
        events=[(what, value.number, None, value.inputs) for what, value in events],
        values=values,
    )
    return _busy_seconds(signature, planned_values(values))


def test_operations_are_added_up_where_the_pass_has_waited() -> None:
    first, second = (torch.tanh, value(0, "tanh")), (torch.exp, value(1, "exp", 0))
    assert seconds(first, second) == pytest.approx(0.3)
    assert seconds(first, second, is_on_gpu=False) == LONG


def test_what_a_call_keeps_is_made_by_that_call() -> None:
    mask = byproduct_of(torch.dropout)
    assert mask is not None
    dropped = (torch.dropout, value(0, "dropout")), (mask, value(1, mask.__name__))
    assert seconds(*dropped) == pytest.approx(0.1)


def test_what_is_written_over_is_computed_once() -> None:
    product, added = value(0, "matmul"), value(1, "add_", 0, over=(0,))
    assert seconds((torch.matmul, product), (torch.Tensor.add_, added)) == pytest.approx(0.3)
