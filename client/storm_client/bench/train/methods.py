"""The ways to keep a step's activations that are compared.

What stays true: every method is given the same forward and leaves the head and the loss alone,
whose tensors are needed at once; what a method cannot do here is `Unavailable` with the reason,
never a silent substitute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import storm_client as storm

__all__ = ["METHODS", "MIN_BYTES", "Active", "Method", "Unavailable"]

MIN_BYTES: Final = 1 << 20
"""Smaller tensors stay where they are, with every method that can be told so."""

_CONNECT_SECONDS: Final = 30.0
_PEERS_NEED_A_GPU: Final = "it moves tensors between a GPU and the host, and there is no GPU here"


class Unavailable(Exception):
    """The method cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Active:
    """A method in use: the context of one forward, and figures of its own so far."""

    context: Callable[[], AbstractContextManager[object]] = nullcontext
    figures: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True, slots=True)
class Method:
    """`enter` takes the model, its device and a daemon's address; it may raise Unavailable."""

    enter: Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]]
    recompute: bool = False
    """Whether every block is checkpointed, so that only its input is saved."""


@contextmanager
def _nothing(_model: nn.Module, _device: torch.device, _address: str) -> Iterator[Active]:
    yield Active()


@contextmanager
def _save_on_cpu(_model: nn.Module, device: torch.device, _address: str) -> Iterator[Active]:
    _need_gpu(device)
    yield Active(lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))


@contextmanager
def _trl(model: nn.Module, device: torch.device, _address: str) -> Iterator[Active]:
    _need_gpu(device)
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError as error:
        raise Unavailable(f"TRL cannot be imported: {error}") from error
    context = OffloadActivations(use_streams=True, min_offload_size=MIN_BYTES)
    context.update_model_params(model)
    yield Active(lambda: context)


@contextmanager
def _torchtune(_model: nn.Module, device: torch.device, _address: str) -> Iterator[Active]:
    _need_gpu(device)
    try:
        from torchtune.training import OffloadActivations
    except ImportError as error:
        raise Unavailable(f"torchtune cannot be imported: {error}") from error
    context = OffloadActivations(use_streams=True, min_offload_size=MIN_BYTES)
    yield Active(lambda: context)


def _storm(codec: str) -> Callable[[nn.Module, torch.device, str], AbstractContextManager[Active]]:
    @contextmanager
    def enter(model: nn.Module, _device: torch.device, address: str) -> Iterator[Active]:
        with storm.connect(address, embedded="never", timeout=_CONNECT_SECONDS) as client:
            offload = client.offload(model, min_bytes=MIN_BYTES, codec=codec)
            yield Active(lambda: offload, lambda: _figures(offload.stats()))

    return enter


METHODS: Final[dict[str, Method]] = {
    "none": Method(_nothing),
    "checkpoint": Method(_nothing, recompute=True),
    "save-on-cpu": Method(_save_on_cpu),
    "trl": Method(_trl),
    "torchtune": Method(_torchtune),
    "storm": Method(_storm("ancf")),
    "storm-raw": Method(_storm("raw")),
    "storm-checkpoint": Method(_storm("ancf"), recompute=True),
}


def _need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(_PEERS_NEED_A_GPU)


def _figures(stats: storm.OffloadStats) -> dict[str, Any]:
    """Return the totals since the start as JSON values."""
    return {
        "saved_bytes": stats.saved_bytes,
        "deduplicated_bytes": stats.deduplicated_bytes,
        "offloaded_bytes": stats.offloaded_bytes,
        "stored_bytes": stats.stored_bytes,
        "kept_bytes": stats.kept_bytes,
        "kept": dict(stats.kept),
        "ratio": stats.ratio,
        "stored_by_mode": dict(stats.stored_by_mode),
        "store_seconds": stats.store_seconds,
        "restore_wait_seconds": stats.restore_wait_seconds,
    }
