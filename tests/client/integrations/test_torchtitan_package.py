"""Both integrations with torchtitan itself, 0.3.0, where that is installed.

Its Llama on a CPU, with PyTorch's attention in the place of FlexAttention, which has no backward
pass there. `test_torchtitan.py` and `test_torchtitan_graph.py` need no torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.connecting import _SHARED, Connected
from storm_client.integrations.torchtitan_graph import register
from support.training import assert_identical, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

ROWS, LENGTH = 2, 256
GRAPH = "torchtitan.experiments.graph_trainer"


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What makes torchtitan's debug model, each time with the same weights."""
    attention = import_module("torchtitan.models.common.attention")
    monkeypatch.setattr(attention.FlexAttention, "compiled_flex_attn", staticmethod(causal))

    def made() -> Any:
        torch.manual_seed(0)
        model = import_module("torchtitan.models.llama3").model_registry("debugmodel").model.build()
        model.init_states(buffer_device=torch.device("cpu"))
        return model

    return made


def causal(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    shared = {name: options[name] for name in ("scale", "enable_gqa")}
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **shared), None


def inputs(model: Any) -> tuple[Tensor, Tensor, Any]:
    tokens = torch.randint(0, 2000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    return tokens, positions, model.get_attention_masks(positions)


def loss_of(model: Any, tokens: Tensor, positions: Tensor, masks: Any) -> Tensor:
    logits = model(tokens, positions, masks).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, tokens.flatten())


def test_a_model_with_the_policy_trains_alike(
    llama: Any, client: storm.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_SHARED, "_connected", Connected(client._supply, None))
    policy_class = import_module("storm_client.integrations.torchtitan").StormOffload
    plain, model = llama(), llama()
    expected = loss_of(plain, *inputs(plain))
    expected.backward()
    policy = policy_class.Config(min_bytes="4KiB").build(dump_folder="")
    policy.apply(model)
    for _ in range(4):
        model.zero_grad()
        loss = loss_of(model, *inputs(model))
        loss.backward()
        assert_identical([loss, *gradients(model)], [expected, *gradients(plain)])
    stats = policy.offload.stats()
    assert stats.offloaded_bytes > 0 < stats.replayed_bytes


@pytest.mark.parametrize("host_gb", [0.0, 1.0])
def test_a_traced_step_is_tagged_and_its_passes_take_the_tags(llama: Any, host_gb: float) -> None:
    model = llama()
    import_module(f"{GRAPH}.common_utils").annotate_module_fqns(model)
    tokens, positions, masks = inputs(model)

    def step(tokens: Tensor, positions: Tensor) -> list[Tensor]:
        loss = loss_of(model, tokens, positions, masks)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = step(tokens, positions)
    register("stormd", budget=0.25)
    tracer = import_module(f"{GRAPH}.make_fx_tracer")
    traced = tracer.minimal_fx_tracer(step, module=model)(tokens, positions)
    config = SimpleNamespace(
        compile=SimpleNamespace(memory_policy="stormd", cpu_offload_budget_gb=host_gb),
        parallelism=SimpleNamespace(
            fsdp_reshard_after_forward="default", pipeline_parallel_degree=1
        ),
    )
    gm = import_module(f"{GRAPH}.memory_policy").tag_with_memory_policy_pass(
        traced.gm, None, config=config
    )
    tags = [node.meta.get("recompute") for node in gm.graph.nodes]
    assert tags.count(CheckpointPolicy.MUST_RECOMPUTE) > 0
    assert (tags.count(CheckpointPolicy.MUST_CPU_OFFLOAD) > 0) == (host_gb > 0)
    gm = import_module(f"{GRAPH}.cpu_offload").apply_cpu_offload_pass(gm, None)
    remat = import_module(f"{GRAPH}.selective_activation_remat")
    traced.gm = remat.selective_activation_remat_pass(gm, None)
    if host_gb:  # what it offloads by needs an accelerator
        assert any("offload" in str(node.target) for node in traced.gm.graph.nodes)
        return
    found = tracer.run_traced(traced, module=model)(tokens, positions)
    assert_identical(found, expected)
