"""Offloads the activations of a torchtitan trainer, in the place of activation checkpointing.

    from storm_client.integrations.torchtitan import StormOffload

    Trainer.Config(..., activation_checkpoint=StormOffload.Config(min_bytes=1 << 20))

torchtitan applies such a policy to each part of a model before it compiles and shards it. This one
recomputes nothing: it has each part's forward run inside an Offload's block. The loss is computed
outside, and needed at once.

StormOffload is made when it is first asked for, because it derives from torchtitan's
ActivationCheckpointing. What torchtitan's `graph_trainer` traces into one graph saves nothing that
hooks could see: there is nothing here for it.
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
"""Options of `Client.offload` that the configuration has, unset where they are None."""


def __getattr__(name: str) -> Any:
    if name != "StormOffload":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _make_class()
    return made


def _make_class() -> type:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    class StormOffload(ActivationCheckpointing):  # type: ignore[misc]  # its types are not read
        """Has a model's activations kept by stormd; nothing is recomputed."""

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
            """Return the block as it is: blocks are all inside the model's forward."""
            return module

        def apply(self, model: torch.nn.Module) -> None:
            """Have each forward of the model run inside an Offload's block.

            Raises:
                UsageError: what Client.offload does not take.
                DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
            """
            given = {name: getattr(self.config, name) for name in OPTIONS}
            options = {name: value for name, value in given.items() if value is not None}
            self.offload = make_offload(None, model, options)
            enter_in_forward(model, self.offload)

    StormOffload.__module__ = __name__
    StormOffload.__qualname__ = "StormOffload"
    return StormOffload
