"""Offloads the activations of a torchtitan trainer, instead of activation checkpointing.

    from storm_client.integrations.torchtitan import StormOffload

    Trainer.Config(..., activation_checkpoint=StormOffload.Config(min_bytes=1 << 20))

torchtitan applies such a policy to each part of a model before it compiles and shards the part.
This policy recomputes nothing: it runs each part's forward inside an Offload's block. The loss is
computed outside, since its values are needed at once.

StormOffload is created on first use, because it derives from torchtitan's ActivationCheckpointing.
torchtitan's `graph_trainer` traces a step into one graph, whose saves no hook can see: this module
does not support it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storm_client.integrations.forwards import enter_in_forward
from storm_client.integrations.offloads import make_offload

if TYPE_CHECKING:
    import torch

__all__ = ["StormOffload"]  # noqa: F822 - made by __getattr__

OPTIONS = ("min_bytes", "codec", "budget")
"""Options of `Client.offload` that the configuration has; None leaves an option unset."""


def __getattr__(name: str) -> Any:
    if name != "StormOffload":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_class()
    return made


def _make_class() -> type:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    class StormOffload(ActivationCheckpointing):  # type: ignore[misc]  # its types are not read
        """Offloads a model's activations to stormd; recomputes nothing."""

        @dataclass(kw_only=True, slots=True)
        class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
            """Options of `Client.offload`; None leaves a default."""

            min_bytes: int | str | None = None
            codec: str | None = None
            budget: str | None = None

        def _wrap_block(
            self,
            module: torch.nn.Module,
            *,
            base_fqn: str | None = None,  # noqa: ARG002 - torchtitan passes it
        ) -> torch.nn.Module:
            """Return the block unchanged: all blocks are inside the model's forward."""
            return module

        def apply(self, model: torch.nn.Module) -> None:
            """Run each forward of the model inside an Offload's block.

            Raises:
                UsageError: as `Client.offload`.
                DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
            """
            given = {name: getattr(self.config, name) for name in OPTIONS}
            options = {name: value for name, value in given.items() if value is not None}
            self.offload = make_offload(None, model, options)
            enter_in_forward(model, self.offload)

    StormOffload.__module__ = __name__
    StormOffload.__qualname__ = "StormOffload"
    return StormOffload
