"""Replaces TRL's own activation offloading, in SFT, DPO, KTO and reward training.

    from storm_client.integrations.trl import get_act_offloading_ctx_manager

    trainer = SFTTrainer(model=model, args=config, train_dataset=data)
    trainer.maybe_activation_offload_context = get_act_offloading_ctx_manager(trainer.model)

The signature is that of `trl.models.get_act_offloading_ctx_manager`, so a loop that calls TRL's
function has to change its import only. TRL enters the context around a whole training step. With
`storm_client.integrations.transformers.offload_trainer`, which supports every TRL trainer as well,
a block ends where the backward pass begins, and the logs contain offload figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storm_client.integrations.offloads import make_offload

if TYPE_CHECKING:
    import torch

    from storm_client.client import Client
    from storm_client.offloading import Offload

__all__ = ["get_act_offloading_ctx_manager"]


def get_act_offloading_ctx_manager(  # noqa: PLR0917 - as many by place as TRL's
    model: torch.nn.Module,
    use_pin_memory: bool = True,  # noqa: ARG001 - and this and others as in TRL's
    use_streams: bool = True,  # noqa: ARG001
    min_offload_size: int = 1 << 20,
    max_fwd_stash_size: int = 5,  # noqa: ARG001
    warn_if_no_head: bool = True,  # noqa: ARG001
    *,
    client: Client | None = None,
    **options: Any,
) -> Offload:
    """Return an Offload of `model`, to be entered around each training step.

    `min_offload_size` is the `min_bytes` of `Client.offload`. Its default is 1 MiB, where TRL has
    1 KiB, because offloading a tensor costs some 40 microseconds. `options` are the other options
    of `Client.offload`. Without `client`, the process's shared client is used.

    The remaining arguments have no effect; they are accepted so that calls need no change. The
    daemon's pool is always pinned, and the daemon copies on its own streams and learns how much to
    hold back. An output head needs no hook, because values that a step needs again at once are not
    offloaded.

    Raises:
        UsageError: as `Client.offload`.
        DaemonUnavailable, ProtocolMismatch: as `storm_client.connect`.
    """
    return make_offload(client, model, {"min_bytes": min_offload_size, **options})
