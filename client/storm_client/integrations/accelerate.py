"""Offloads the micro-batches of a training loop that uses Accelerate.

    from storm_client.integrations.accelerate import accumulate

    offload = storm.offload(model)
    for batch in loader:
        with accumulate(accelerator, offload, model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

If the model is sharded, offloading can be restricted to the layers that Accelerate's FSDP plugin
wraps:

    offload_only(offload, auto_wrapped_layers(accelerator, model))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from storm_client.errors import UsageError
from storm_client.integrations.forwards import offload_only

if TYPE_CHECKING:
    import torch

    from storm_client.offloading import Offload

__all__ = ["accumulate", "auto_wrapped_layers", "offload_only"]


@contextmanager
def accumulate(accelerator: Any, offload: Offload, *models: torch.nn.Module) -> Iterator[None]:
    """Do what `accelerator.accumulate(*models)` does, inside a block of `offload`.

    Forward and backward pass may both be inside. The graph of a loss that is used later remains
    valid after the block, as it does without an Offload.

    Raises:
        UsageError, DaemonLost: as entering `offload`.
    """
    with accelerator.accumulate(*models), offload:
        yield


def auto_wrapped_layers(accelerator: Any, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of `model` that the FSDP plugin's auto-wrap policy chooses.

    They are those that `activation_checkpointing` of the plugin would checkpoint. This may be
    called before or after `accelerator.prepare`.

    Raises:
        UsageError: there is no FSDP plugin, it has no auto-wrap policy or a custom one, or the
            policy chooses nothing.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        raise UsageError(
            "the accelerator has no FSDP plugin, so no auto-wrap policy: pass "
            "Accelerator(fsdp_plugin=...), or choose the layers yourself for offload_only"
        )
    chooses = _choice(plugin, model)
    if chooses is None:
        raise UsageError(
            f"the FSDP plugin's auto_wrap_policy is {plugin.auto_wrap_policy!r}; set "
            "'transformer_based_wrap' or 'size_based_wrap', or choose the layers yourself for "
            "offload_only"
        )
    layers = [module for module in model.modules() if module is not model and chooses(module)]
    if not layers:
        raise UsageError(
            f"the FSDP plugin's auto-wrap policy chooses no layer of {type(model).__name__}: set "
            "transformer_cls_names_to_wrap or min_num_params"
        )
    return layers


def _choice(plugin: Any, model: torch.nn.Module) -> Callable[[torch.nn.Module], bool] | None:
    """Return a function that tells whether Accelerate's policy wraps a module; None for others.

    Accelerate's own policy does not work on a sharded model: `fully_shard` replaces the class of
    each layer by one with another name, which derives from the layer's class.
    """
    from torch.distributed.fsdp.wrap import (
        size_based_auto_wrap_policy,
        transformer_auto_wrap_policy,
    )

    policy = plugin.auto_wrap_policy
    policy = policy.func if isinstance(policy, partial) else policy
    if policy is size_based_auto_wrap_policy:
        return lambda module: sum(p.numel() for p in module.parameters()) > plugin.min_num_params
    if policy is not transformer_auto_wrap_policy:
        return None
    names = plugin.transformer_cls_names_to_wrap
    wanted = set(getattr(model, "_no_split_modules", None) or () if names is None else names)

    def chooses(module: torch.nn.Module) -> bool:
        # A checkpoint's wrapper counts as the layer in it: it saves the layer's inputs.
        layer = getattr(module, "_checkpoint_wrapped_module", module)
        return any(kind.__name__ in wanted for kind in type(layer).__mro__)

    return chooses
