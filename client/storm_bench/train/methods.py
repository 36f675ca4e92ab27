"""The compared methods to keep a step's activations.

Every method is given the same forward pass. Other packages' methods do not cover the head and the
loss, whose tensors are needed at once. stormd covers both and decides about their tensors, as in
its README. A method that cannot run here raises `Unavailable` with the reason. It is never silently
replaced by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, TypeAlias

import storm_client as storm
import torch
from storm_kernels import UsageError, gemm
from storm_kernels.nn import GatedMLP
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from storm_bench.train import BUDGET_PREFIX
from storm_bench.train.gpt import Block as GptBlock
from storm_bench.train.workloads import Net, plain_loss

__all__ = [
    "METHODS",
    "MIN_BYTES",
    "PRODUCTS_AND_ATTENTION",
    "Active",
    "Method",
    "Unavailable",
    "method_of",
]

MIN_BYTES: Final = 1 << 20
"""Smaller tensors are kept on the device by every method that has such a setting."""

_aten = torch.ops.aten
PRODUCTS_AND_ATTENTION: Final = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
    _aten._grouped_mm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""The operations whose outputs selective checkpointing saves."""

_CONNECT_SECONDS: Final = 30.0
_NEEDS_A_GPU: Final = "it is about tensors on a GPU, and there is no GPU here"


Block: TypeAlias = Callable[[Tensor], Tensor]


class Unavailable(Exception):
    """The method cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Active:
    """A method in use: the context of one forward pass, and the method's own figures so far."""

    context: Callable[[], AbstractContextManager[object]] = nullcontext
    figures: Callable[[], dict[str, Any]] = dict
    covers_loss: bool = False
    """Whether the context also covers the head and the loss."""


def _plainly(block: Block, x: Tensor) -> Tensor:
    return block(x)


def _checkpointed(block: Block, x: Tensor) -> Tensor:
    """Save only the block's input, and recompute the block in the backward pass."""
    out: Tensor = checkpoint(block, x, use_reentrant=False)
    return out


def _selectively(block: Block, x: Tensor) -> Tensor:
    """Also save the outputs of products and attention, and recompute only the rest."""
    contexts = partial(create_selective_checkpoint_contexts, PRODUCTS_AND_ATTENTION)
    out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return out


def _tiled_loss(net: Net, x: Tensor, targets: Tensor) -> Tensor:
    """Return the same bits by stormd's loss, which never holds all logits in float32 at once."""
    flat = targets.flatten()
    return storm.cross_entropy(net.logits(x).flatten(0, 1), flat, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Method:
    """`enter` takes the model, its device and a daemon's address; it may raise Unavailable."""

    enter: Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]]
    run: Callable[[Block, Tensor], Tensor] = _plainly
    """How a block is run on its input."""
    loss: Callable[[Net, Tensor, Tensor], Tensor] = plain_loss
    """Computes the loss from the last block's output and the targets."""


@contextmanager
def _nothing(_model: nn.Module, _device: torch.device, _address: str) -> Iterator[Active]:
    yield Active()


@contextmanager
def _save_on_cpu(_model: nn.Module, device: torch.device, _address: str) -> Iterator[Active]:
    _need_gpu(device)
    yield Active(lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


def _peer(module: str) -> Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]]:
    """Return the `enter` of another package's OffloadActivations; the two have one origin."""

    @contextmanager
    def enter(model: nn.Module, device: torch.device, _address: str) -> Iterator[Active]:
        _need_gpu(device)
        try:
            offloading = import_module(module)
            if module.startswith("trl."):
                import_module("accelerate").PartialState()  # a Trainer has it; TRL's logger asks it
        except ImportError as error:
            package = module.partition(".")[0]
            raise Unavailable(f"{package} cannot be imported: {error}") from error
        context = offloading.OffloadActivations(use_streams=True, min_offload_size=MIN_BYTES)
        if hasattr(context, "update_model_params"):
            context.update_model_params(model)  # which TRL does not offload
        yield Active(lambda: context)

    return enter


def _storm(
    codec: str = "ancf", **plan: Any
) -> Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]]:
    @contextmanager
    def enter(model: nn.Module, _device: torch.device, address: str) -> Iterator[Active]:
        with storm.connect(address, embedded="never", timeout=_CONNECT_SECONDS) as client:
            offload = client.offload(model, min_bytes=MIN_BYTES, codec=codec, **plan)
            yield Active(lambda: offload, lambda: _figures(offload), covers_loss=True)

    return enter


def _gated(
    enter: Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]],
) -> Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]]:
    """Return an `enter` that puts `storm_kernels.nn.GatedMLP` in place of the model's MLPs."""

    @contextmanager
    def entered(model: nn.Module, device: torch.device, address: str) -> Iterator[Active]:
        kernel = gemm.backends()["cuda"]
        if device.type != "cuda" or not kernel.available:
            raise Unavailable(kernel.detail)
        with _gated_mlps(model), enter(model, device, address) as active:
            yield active

    return entered


@contextmanager
def _gated_mlps(model: nn.Module) -> Iterator[None]:
    """Have a GPT's or Llama's blocks compute their MLPs by GatedMLP, on the same parameters."""
    places: list[tuple[nn.Module, str, nn.Module]] = []
    for module in model.modules():
        mlp = getattr(module, "mlp", None)
        if isinstance(module, GptBlock):
            places.append((module, "gated", module))
        elif isinstance(mlp, nn.Module):
            places.append((module, "mlp", mlp))
    before = [getattr(block, name) for block, name, _ in places]
    try:
        for block, name, module in places:
            setattr(block, name, GatedMLP.from_module(module))
        yield
    except UsageError as refused:
        raise Unavailable(str(refused)) from refused
    finally:
        for (block, name, _), module in zip(places, before, strict=True):
            setattr(block, name, module)


METHODS: Final[dict[str, Method]] = {
    "none": Method(_nothing),
    "checkpoint": Method(_nothing, _checkpointed),
    "checkpoint-tiled-loss": Method(_nothing, _checkpointed, _tiled_loss),
    "checkpoint-on-cpu": Method(_save_on_cpu, _checkpointed),
    "selective": Method(_nothing, _selectively),
    "save-on-cpu": Method(_save_on_cpu),
    "trl": Method(_peer("trl.models.activation_offloading")),
    "torchtune": Method(_peer("torchtune.training")),
    "storm": Method(_storm()),
    "storm-no-replay": Method(_storm(replay=False)),
    "storm-raw": Method(_storm("raw")),
    "storm-checkpoint": Method(_storm(), _checkpointed),
    "gated": Method(_gated(_nothing)),
    "storm-gated": Method(_gated(_storm())),
}


def method_of(name: str) -> Method:
    """Return the method of that name; `storm-budget=...` is "storm" with that budget.

    Raises:
        KeyError: there is no such method.
    """
    if name.startswith(BUDGET_PREFIX):
        return Method(_storm(budget=name.removeprefix(BUDGET_PREFIX)))
    return METHODS[name]


def _need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(_NEEDS_A_GPU)


def _figures(offload: storm.Offload) -> dict[str, Any]:
    """Return the totals since the start, and the plan, as JSON values."""
    stats = offload.stats()
    return {
        "plan": str(offload.plan).splitlines(),
        "saved_bytes": stats.saved_bytes,
        "deduplicated_bytes": stats.deduplicated_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
        "stored_bytes": stats.stored_bytes,
        "kept_bytes": stats.kept_bytes,
        "replayed_bytes": stats.replayed_bytes,
        "kept": dict(stats.kept),
        "ratio": stats.ratio,
        "stored_by_mode": dict(stats.stored_by_mode),
        "store_seconds": stats.store_seconds,
        "restore_wait_seconds": stats.restore_wait_seconds,
        "replay_seconds": stats.replay_seconds,
    }
