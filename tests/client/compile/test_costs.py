"""What nodes are taken to cost: views nothing, products arithmetic, the rest their traffic."""

from __future__ import annotations

import pytest
import torch
from storm_client.compile.costs import CPU, CUDA, machine_of, nbytes_of, seconds_of
from torch.fx.experimental.proxy_tensor import make_fx


def seconds(function: object, *shapes: tuple[int, ...]) -> list[float]:
    traced = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes))
    return [seconds_of(n, CPU) for n in traced.graph.nodes if n.op == "call_function"]


def test_views_are_free() -> None:
    assert seconds(lambda x: x.t(), (64, 64)) == [0.0]


def test_elementwise_operations_cost_their_traffic() -> None:
    assert seconds(torch.sin, (1000, 1000)) == [pytest.approx(8e6 / CPU.bandwidth)]


def test_products_cost_their_arithmetic() -> None:
    (found,) = seconds(torch.mm, (512, 512), (512, 512))
    assert found == pytest.approx(2 * 512**3 / CPU.flops)


def test_each_kind_of_device_has_its_rates() -> None:
    assert machine_of(torch.device("cuda")) is CUDA
    assert machine_of(torch.device("cpu")) is CPU


def test_bytes_of_several_values_add_up() -> None:
    assert nbytes_of([torch.ones(3), (torch.ones(2, dtype=torch.half), None, 7)]) == 16
