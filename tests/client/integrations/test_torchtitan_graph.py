"""The memory policy, on graphs that PyTorch traced, against a stand-in for torchtitan's registry.

What stands in is read from torchtitan's `experiments/graph_trainer`, August 2026: `registry.py`,
the "default" policy of `memory_policy.py`, and the marks that its tracer leaves on nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.integrations.torchtitan_graph import MIN_BYTES, register, tag_activations
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx import traceback as marks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

SAVE = CheckpointPolicy.MUST_SAVE
AGAIN = CheckpointPolicy.MUST_RECOMPUTE
OFFLOAD = CheckpointPolicy.MUST_CPU_OFFLOAD
LAYERS = 3
ROWS, WIDTH = 256, 64
PLENTY = 1 << 40


def traced(dropout: float = 0.0) -> GraphModule:
    """Return the joint graph of a small model's step, marked as torchtitan's tracer does."""
    norm = nn.LayerNorm(WIDTH)

    def block(x: Tensor, number: int, up: Tensor, down: Tensor) -> Tensor:
        with marks.annotate({"module_fqn": f"layers.{number}.mlp"}):
            h = nn.functional.gelu(norm(x) @ up.t())
            h = nn.functional.dropout(h, dropout) if dropout else h
            return x + h @ down.t()

    def step(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        for number in range(LAYERS):
            x = block(x, number, up, down)
        with marks.annotate({"module_fqn": "loss"}):
            loss = x.square().mean()
        return torch.autograd.grad(loss, (up, down))

    torch.manual_seed(0)
    weights = [torch.randn(2 * WIDTH, WIDTH), torch.randn(WIDTH, 2 * WIDTH)]
    inputs = (torch.randn(ROWS, WIDTH), *(one.requires_grad_() for one in weights))
    with marks.preserve_node_meta():
        gm = make_fx(step)(*inputs)
    begun = False
    for node in gm.graph.nodes:
        begun |= node.name == "ones_like"  # the first node of the backward pass
        if begun:
            node.meta["autograd_backward"] = True
    return gm


def default(gm: GraphModule, *, config: Any) -> GraphModule:
    """Tag as torchtitan's own policy does: save products, compute the rest again."""
    for node in gm.graph.nodes:
        is_layer = node.meta.get("custom", {}).get("module_fqn", "").startswith("layers")
        if node.op == "call_function" and is_layer and not is_backward(node):
            is_product = node.target is torch.ops.aten.mm.default
            node.meta["recompute"] = SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
    return gm


def is_backward(node: Node) -> bool:
    return bool(node.meta.get("autograd_backward"))


def tagged(gm: GraphModule, policy: CheckpointPolicy) -> list[Node]:
    return [node for node in gm.graph.nodes if node.meta.get("recompute") is policy]


def names(nodes: list[Node]) -> set[str]:
    return {str(node.target) for node in nodes}


def layers(nodes: list[Node]) -> set[str]:
    return {node.meta["custom"]["module_fqn"] for node in nodes}


def nbytes(nodes: list[Node]) -> int:
    return sum(node.meta["val"].nbytes for node in nodes)


def can_be_had(node: Node) -> bool:
    """Tell whether the backward pass can have a node's output: kept, brought back or recomputed."""
    if node.op in ("placeholder", "get_attr") or node.meta.get("recompute") in (SAVE, OFFLOAD):
        return True
    if is_backward(node) or node.target is torch.ops.aten.t.default:
        return all(map(can_be_had, node.all_input_nodes))
    is_made_again = node.meta.get("recompute") in (AGAIN, CheckpointPolicy.PREFER_RECOMPUTE)
    return is_made_again and all(map(can_be_had, node.all_input_nodes))


def test_what_is_cheap_is_made_again_and_products_leave() -> None:
    gm = tag_activations(default(traced(), config=None), host_bytes=PLENTY)
    assert "aten.gelu.default" in names(tagged(gm, AGAIN))
    assert "aten.mm.default" not in names(tagged(gm, AGAIN))
    assert "aten.mm.default" in names(tagged(gm, OFFLOAD))
    offloaded = layers(tagged(gm, OFFLOAD))
    assert offloaded
    assert f"layers.{LAYERS - 1}.mlp" not in offloaded, "the last layer is needed at once"
    for node in gm.graph.nodes:  # what is small or outside of layers is left alone
        if "recompute" in node.meta:
            assert node.meta["custom"]["module_fqn"].startswith("layers.")
            assert not is_backward(node)
            assert node.meta["recompute"] is not OFFLOAD or nbytes([node]) >= MIN_BYTES


def test_all_that_the_backward_pass_reads_can_be_had() -> None:
    for dropout in (0.0, 0.1):
        gm = tag_activations(default(traced(dropout), config=None), host_bytes=PLENTY)
        layers_forward = [
            node
            for node in gm.graph.nodes
            if not is_backward(node) and any(map(is_backward, node.users))
            if node.meta.get("custom", {}).get("module_fqn", "").startswith("layers")
        ]
        assert layers_forward
        for node in layers_forward:
            assert can_be_had(node), node.name


def test_what_the_budget_keeps_is_saved() -> None:
    whole = tag_activations(default(traced(), config=None), budget=1.0, host_bytes=PLENTY)
    assert tagged(whole, OFFLOAD) == []
    assert tagged(whole, AGAIN) == []
    little = tag_activations(default(traced(), config=None), budget=0, host_bytes=PLENTY)
    some = tag_activations(default(traced(), config=None), budget=256 << 10, host_bytes=PLENTY)
    assert 0 < nbytes(tagged(some, OFFLOAD)) < nbytes(tagged(little, OFFLOAD))


def test_no_more_is_offloaded_than_the_host_takes() -> None:
    room = nbytes(tagged(tag_activations(traced(), host_bytes=PLENTY), OFFLOAD)) - 1
    assert 0 < nbytes(tagged(tag_activations(traced(), host_bytes=room), OFFLOAD)) <= room


def test_what_is_random_or_written_to_is_not_made_again() -> None:
    gm = tag_activations(default(traced(dropout=0.1), config=None), host_bytes=PLENTY)
    again = [node for node in tagged(gm, AGAIN) if isinstance(node.target, torch._ops.OpOverload)]
    assert again
    for node in again:
        assert torch.Tag.nondeterministic_seeded not in node.target.tags
        assert not node.target._schema.is_mutable
        for source in node.all_input_nodes:
            writers = [user for user in source.users if getattr(user.target, "_schema", None)]
            assert not any(user.target._schema.is_mutable for user in writers)
    written = {"aten.empty_like.default", "aten.bernoulli_.float", "aten.div_.Scalar"}
    assert written & names(gm.graph.nodes)
    assert not written & names(tagged(gm, OFFLOAD)), "it would leave before it is written"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    policies: dict[str, Callable[..., Any]] = {"default": default}

    def register_memory_policy(name: str) -> Callable[[Any], Any]:
        return lambda function: policies.setdefault(name, function)

    parent = "torchtitan.experiments.graph_trainer"
    names = ("torchtitan", "torchtitan.experiments", parent)
    made = {name: ModuleType(name) for name in (*names, f"{parent}.registry")}
    made[f"{parent}.registry"].MEMORY_POLICY_REGISTRY = policies
    made[f"{parent}.registry"].register_memory_policy = register_memory_policy
    made[parent].memory_policy = ModuleType(f"{parent}.memory_policy")
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return policies


def test_torchtitan_finds_it_by_name(registry: dict[str, Callable[..., Any]]) -> None:
    register("stormd", budget="0.5")
    config = SimpleNamespace(compile=SimpleNamespace(cpu_offload_budget_gb=100.0))
    gm = traced()
    assert registry["stormd"](gm, config=config) is gm
    assert tagged(gm, SAVE)
    tight = SimpleNamespace(compile=SimpleNamespace(cpu_offload_budget_gb=0.0))
    assert tagged(registry["stormd"](traced(), config=tight), OFFLOAD) == []


@pytest.mark.parametrize(("budget", "why"), [("fit", "before anything has run"), ("2.0", "0.0 to")])
def test_budgets_that_cannot_be(
    registry: dict[str, Callable[..., Any]], budget: str, why: str
) -> None:
    with pytest.raises(storm.UsageError, match=why):
        register(budget=budget)
    assert list(registry) == ["default"]
