"""A loop with Accelerate and offload has the losses and weights of the loop without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import storm_client as storm
import torch
from support import frameworks
from support.accelerate_ranks import train
from support.tiny_llama import tiny_llama, token_rows
from support.training import assert_identical

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from storm_client.integrations.accelerate import (  # noqa: E402 - skipped before
    auto_wrapped_layers,
    offload_only,
)

pytestmark = pytest.mark.usefixtures("on_each_device")

MIN_BYTES = 4096


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Leave nothing in the state that all accelerators of a process share."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def _accelerator(**settings: Any) -> Any:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(
        cpu=frameworks.is_cpu(), gradient_accumulation_steps=2, **settings
    )


def _train(
    client: storm.Client | None, *, only_layers: bool = False, **settings: Any
) -> tuple[list[torch.Tensor], storm.Offload | None]:
    accelerator = _accelerator(**settings)
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(token_rows(12), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    offload = None if client is None else client.offload(model, min_bytes=MIN_BYTES)
    if only_layers:
        accelerator.state.fsdp_plugin = _plugin()
        offload_only(offload, auto_wrapped_layers(accelerator, model))
    losses = train(accelerator, model, optimizer, loader, offload)
    return [*losses, *(p.detach() for p in model.parameters())], offload


def _plugin(**settings: Any) -> Any:
    return accelerate.FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **settings}
    )


@pytest.mark.parametrize(("precision", "only_layers"), [("no", True), ("bf16", False)])
def test_losses_and_weights_are_identical(
    precision: str, only_layers: bool, client: storm.Client
) -> None:
    expected, _ = _train(None, mixed_precision=precision)
    found, offload = _train(client, only_layers=only_layers, mixed_precision=precision)
    assert_identical(found, expected)
    stats = offload.stats()
    assert stats.offloaded_bytes > 0
    assert set(stats.kept) <= frameworks.may_keep()
    assert ("outside" in stats.skipped) == only_layers


def test_the_layers_are_those_of_the_policy() -> None:
    accelerator, model = _accelerator(), tiny_llama()
    blocks = list(model.model.layers)
    accelerator.state.fsdp_plugin = _plugin()
    assert auto_wrapped_layers(accelerator, model) == blocks
    accelerator.state.fsdp_plugin = _plugin(transformer_cls_names_to_wrap=["LlamaMLP"])
    assert auto_wrapped_layers(accelerator, model) == [block.mlp for block in blocks]
    size = sum(p.numel() for p in blocks[0].mlp.parameters()) - 1
    accelerator.state.fsdp_plugin = _plugin(auto_wrap_policy="size_based_wrap", min_num_params=size)
    found = auto_wrapped_layers(accelerator, model)
    assert set(blocks) < set(found)
    assert all(sum(p.numel() for p in one.parameters()) > size for one in found)


def test_without_a_policy_it_says_what_to_set() -> None:
    accelerator, model = _accelerator(), tiny_llama()
    with pytest.raises(storm.UsageError, match="has no FSDP plugin"):
        auto_wrapped_layers(accelerator, model)
    accelerator.state.fsdp_plugin = _plugin(auto_wrap_policy="no_wrap")
    with pytest.raises(storm.UsageError, match="auto_wrap_policy is None; set"):
        auto_wrapped_layers(accelerator, model)
    accelerator.state.fsdp_plugin = _plugin(
        auto_wrap_policy="size_based_wrap", min_num_params=1 << 40
    )
    with pytest.raises(storm.UsageError, match="chooses no layer of LlamaForCausalLM"):
        auto_wrapped_layers(accelerator, model)
