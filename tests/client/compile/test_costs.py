"""What nodes are taken to cost: views nothing, products arithmetic, the rest their traffic."""

from __future__ import annotations

import pytest
import torch
from storm_client.compile.costs import seconds_of
from storm_client.planner.machine import CPU
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
QUERIES, KEYS = (2, 8, 256, 64), (2, 8, 512, 64)
PRODUCTS = 2 * (2 * 8 * 256 * 512 * 64) / CPU.half_flops


def there(causal: bool) -> object:
    return lambda q, k, v: ATTENTION(q, k, v, 0.0, causal)[0]


def back(causal: bool) -> object:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda q, k, v, sums: backward(q, q, k, v, q, sums, 0.0, causal)[0]


@pytest.mark.parametrize(
    ("function", "shapes", "seconds"),
    [
        (lambda x: x.t(), [(64, 64)], 0.0),
        (torch.sin, [(1000, 1000)], 8e6 / CPU.bandwidth),
        (torch.mm, [(512, 512), (512, 512)], 2 * 512**3 / CPU.half_flops),
        (there(False), [QUERIES, KEYS, KEYS], 2 * PRODUCTS),
        (there(True), [QUERIES, KEYS, KEYS], PRODUCTS),
        (back(False), [QUERIES, KEYS, KEYS, (2, 8, 256)], 5 * PRODUCTS),
        (back(True), [QUERIES, KEYS, KEYS, (2, 8, 256)], 2.5 * PRODUCTS),
    ],
)
def test_the_dearest_node(function: object, shapes: list[tuple[int, ...]], seconds: float) -> None:
    traced = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes))
    found = [seconds_of(n, CPU) for n in traced.graph.nodes if n.op == "call_function"]
    assert max(found) == pytest.approx(seconds)
