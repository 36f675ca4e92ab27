"""What nodes are taken to cost: views nothing, products arithmetic, the rest their traffic."""

from __future__ import annotations

import pytest
import torch
from storm_client.compile.costs import nbytes_of, seconds_of
from storm_client.planner.machine import CPU, CUDA
from torch._subclasses.fake_tensor import FakeTensorMode
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
    assert found == pytest.approx(2 * 512**3 / CPU.half_flops)


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_costs_its_products(causal: bool, share: float) -> None:
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def there(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return run(q, k, v, 0.0, causal)[0]

    def back(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sums: torch.Tensor) -> object:
        aten = torch.ops.aten
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            q, q, k, v, q, sums, 0.0, causal
        )[0]

    queries, keys = (2, 8, 256, 64), (2, 8, 512, 64)
    products = share * 2 * (2 * 8 * 256 * 512 * 64) / CPU.half_flops
    taken = max(seconds(there, queries, keys, keys))
    assert taken == pytest.approx(2 * products)
    assert max(seconds(back, queries, keys, keys, (2, 8, 256))) == pytest.approx(5 * products)


def test_keys_may_be_shared_by_heads() -> None:
    """No operation of a CPU's takes such, so one of a GPU's stands in a graph by hand."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        queries = torch.empty(1, 8, 4096, 64, dtype=torch.bfloat16)
        keys = torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16)
    given = []
    for value in (queries, keys, keys):
        given.append(graph.placeholder("given"))
        given[-1].meta["val"] = value
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    node = graph.call_function(attention, (*given, 0.0, True))
    node.meta["val"] = (queries,)
    assert seconds_of(node, CUDA) == pytest.approx(2 * 8 * 4096 * 4096 * 64 / CUDA.half_flops)


def test_bytes_of_several_values_add_up() -> None:
    assert nbytes_of([torch.ones(3), (torch.ones(2, dtype=torch.half), None, 7)]) == 16
