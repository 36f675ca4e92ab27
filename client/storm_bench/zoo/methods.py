"""The methods to train a whole model that the zoo compares.

`change` modifies the model itself, before ranks share it. `enter` returns the context around each
forward pass. A method that cannot run here raises `Unavailable` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import storm_client as storm
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from storm_bench.train.methods import PRODUCTS_AND_ATTENTION, Unavailable

__all__ = ["METHODS", "Method"]


def _nothing(_model: nn.Module, _budget: str | None) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Method:
    """`change` and `enter` may raise Unavailable."""

    change: Callable[[Any], None] = lambda _model: None
    enter: Callable[[nn.Module, str | None], AbstractContextManager[Any]] = _nothing
    """Takes the model and a budget; returns a context that is entered once per step."""


def _checkpoint_blocks(model: Any, **options: Any) -> None:
    """Checkpoint every block, as the model's own library does it."""
    if hasattr(model, "set_grad_checkpointing"):  # timm's
        model.set_grad_checkpointing(True)
        return
    options["use_reentrant"] = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()


def _checkpoint_selectively(model: Any) -> None:
    """Checkpoint the same blocks, but also save the outputs of products and attention."""
    contexts = partial(create_selective_checkpoint_contexts, PRODUCTS_AND_ATTENTION)
    if not hasattr(model, "set_grad_checkpointing"):
        _checkpoint_blocks(model, context_fn=contexts)
        return
    # timm's own switch takes no contexts
    wrappers = import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    sequences = [module for name, module in model.named_modules() if name.endswith("blocks")]
    if not sequences:
        raise Unavailable(f"{type(model).__name__} has no blocks that can be told apart")
    for blocks in sequences:
        for name, block in blocks.named_children():
            setattr(blocks, name, wrappers.checkpoint_wrapper(block, context_fn=contexts))


def _trl(model: nn.Module, _budget: str | None) -> AbstractContextManager[Any]:
    """Offload as TRL's trainers do: everything except the head's saved tensors."""
    if not torch.cuda.is_available():
        raise Unavailable("TRL copies from a GPU, and there is no GPU here")
    offloading = import_module("trl.models.activation_offloading")
    import_module("accelerate").PartialState()  # which a Trainer has, and TRL's logger asks
    context: AbstractContextManager[Any] = offloading.get_act_offloading_ctx_manager(model)
    return context


def _storm(model: nn.Module, budget: str | None) -> AbstractContextManager[Any]:
    return storm.offload(model, budget=budget)


METHODS: Final[dict[str, Method]] = {
    "none": Method(),
    "checkpoint": Method(change=_checkpoint_blocks),
    "selective": Method(change=_checkpoint_selectively),
    "trl": Method(enter=_trl),
    "storm": Method(enter=_storm),
}
