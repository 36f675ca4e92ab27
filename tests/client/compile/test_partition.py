"""What stands in the graphs: stores where values are made, fetches ahead, waits before use."""

from __future__ import annotations

import pytest
import torch
from storm_client.compile.exactness import exact_in_eager, exact_in_generated_code
from storm_client.compile.operators import FETCH, STORE, WAIT
from storm_client.compile.partition import Partitioner
from storm_client.compile.saved_values import Rules
from storm_client.planner.decisions import REPLAY
from storm_client.planner.in_flight import last_bytes
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.nn.functional import scaled_dot_product_attention

aten = torch.ops.aten


def joint(function, *inputs: Tensor) -> fx.GraphModule:
    return aot_export_joint_simple(function, inputs, trace_joint=True)


def divided(
    function, *inputs: Tensor, budget=0.0, min_bytes: int = 1, exact=exact_in_generated_code
):
    outputs = len(function(*inputs))
    partitioner = Partitioner(Rules(min_bytes, "ancf", exact), budget)
    pair = partitioner(joint(function, *inputs), inputs, num_fwd_outputs=outputs)
    return (*pair, *partitioner.found)


def chain(x: Tensor) -> tuple[Tensor]:
    for _ in range(4):
        x = x.sin().exp()
    return (x,)


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return module.graph.find_nodes(op="call_function", target=target)


def x(*shape: int) -> Tensor:
    return torch.ones(shape or (8, 8), requires_grad=True)


def test_a_wait_stands_before_the_first_use_and_behind_its_fetch() -> None:
    _, backward, _ = divided(chain, x())
    order = {node: index for index, node in enumerate(backward.graph.nodes)}
    waits = calls(backward, WAIT)
    assert len(waits) == len(calls(backward, FETCH)) > 0
    for wait in waits:
        own = [one for one in wait.args[1] if one.args[0] is wait.args[0]]
        assert len(own) == 1
        assert order[own[0]] < order[wait]
        first = min(wait.users, key=order.__getitem__)
        between = [n for n, at in order.items() if order[wait] < at < order[first]]
        assert all(node.target in (WAIT, FETCH) for node in between)
        assert set(wait.args[0].users) == {own[0], wait}
    for fetch in calls(backward, FETCH):  # in any order: a compiler orders by data alone
        after = [wait for wait in waits if order[wait] > order[fetch]]
        assert fetch in min(after, key=order.__getitem__).args[1]


def _views_input(node: fx.Node) -> bool:
    return node.target is aten.t.default and node.args[0].name in (
        "sigmoid",
        "primals_1",
        "primals_2",
    )


def test_inputs_and_outputs_are_lent() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (x @ w).sigmoid()
        return y, (((y @ w).sin() @ w).sin() @ w).sin()

    forward, _, _ = divided(function, x(), x())
    shared = {store.args[0]: store.args[2] for store in calls(forward, STORE)}
    assert set(shared.values()) == {True, False}
    for node, is_shared in shared.items():
        assert is_shared == (
            node.op == "placeholder" or "sigmoid" in node.name or _views_input(node)
        )


def test_small_values_stay() -> None:
    forward, _, graph = divided(chain, x(), min_bytes=1 << 20)
    assert not calls(forward, STORE)
    assert {row.decision for row in graph.plan.rows} == {"keep"}


def test_what_a_compiler_writes_to_in_place_stays() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        y = x @ x
        return (torch.slice_scatter(y, torch.zeros(1, 8), 0, 0, 1).exp(), y.sin())

    forward, _, graph = divided(function, x())
    assert all(store.args[0].target is not aten.mm.default for store in calls(forward, STORE))
    kept = [row.decision for row in graph.plan.rows if row.operation == "aten.mm.default"]
    assert kept == ["keep"]


def test_only_what_is_exact_is_computed_again() -> None:
    def function(x: Tensor, w: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).sin(), scaled_dot_product_attention(wide, wide, wide)  # needs room at once

    inputs = x(), x(), x(1, 2, 64, 16)
    products = []
    for exact in (exact_in_generated_code, exact_in_eager):
        _, backward, graph = divided(function, *inputs, exact=exact)
        products.append(len(calls(backward, aten.mm.default)))
        assert (REPLAY in graph.schedule.draft(0).decisions) == (exact is exact_in_eager)
    assert products == [2, 3]


def test_random_operations_are_not_run_again() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.dropout(x.sin(), 0.5).exp(),)

    _, backward, _ = divided(function, x(), exact=exact_in_eager)
    random = [n for n in backward.graph.nodes if "dropout" in str(n.target) or "rand" in n.name]
    assert all(node.op == "placeholder" for node in random if "backward" not in str(node.target))


@pytest.mark.usefixtures("full_link")
def test_as_much_stays_as_would_be_on_its_way_when_the_backward_pass_comes_next() -> None:
    def function(x: Tensor) -> tuple[Tensor]:
        for _ in range(16):
            x = x.sin().exp()
        return (x.mean(),)

    _, _, graph = divided(function, x())
    peak, least = graph.plan.peak_bytes, graph.schedule.least
    in_flight = last_bytes(sum(row.nbytes for row in graph.plan.rows))
    assert in_flight > graph.plan.rows[0].nbytes, "room for one at least"
    assert least < peak <= least + in_flight
    assert divided(function, x(), budget=0.05)[2].plan.peak_bytes == peak


def test_the_graphs_are_pure_but_for_numbers_and_shapes() -> None:
    """Nothing of this process is in them: they are hashed, pickled and cached."""
    for module in divided(chain, x())[:2]:
        for node in module.graph.nodes:
            if node.target in (STORE, FETCH, WAIT):
                plain = fx.node.map_arg((node.args, node.kwargs), lambda _: 0)
                assert "object at" not in str(plain)
