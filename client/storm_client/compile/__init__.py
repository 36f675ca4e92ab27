"""Compiled models: the plan of what is saved stands inside the graphs.

`compile` and the backend "stormd" of torch.compile have AOTAutograd's joint graph divided with
three choices for each saved value: keep, offload, recompute. For a whole step of training, its
update included, `storm_client.step` does so. Importing this loads no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from storm_client.client import Client
    from storm_client.monitoring.stats import OffloadStats
    from storm_client.planner.plan import Plan

__all__ = ["compile", "compiled_plans", "compiled_stats"]

Model = TypeVar("Model", bound=Callable[..., Any])


def compile(  # noqa: A001 - torch.compile's name
    model: Model,
    *,
    budget: str | float | None = None,
    client: Client | None = None,
    codec: str = "ancf",
    min_bytes: int | str = 1 << 20,
    codegen: str = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Model:
    """Return `model`, a module or function, compiled with a plan of its saved tensors inside.

    Each graph keeps, offloads or recomputes what its backward graph needs. Results are those of
    torch.compile without offload, bit for bit where its kernels are deterministic.

    - `budget`: what may be kept on the device at any moment. "least"; "fit" (what the device has
      free); bytes or a size as "12GiB", for all graphs together that are compiled for this client
      with that budget, as blocks one by one; or as a float a fraction of what each graph saves. By
      default what STORMD_BUDGET says, else "least". A graph that returns a loss has no less than
      the least possible.
    - `client`: what `storm_client.connect` returned, by default one that the process shares. That
      one connects when the first tensor is offloaded.
    - `codec`: "ancf" (lossless) or "raw". Tensors of less than `min_bytes` are kept.
    - `codegen`: "inductor", or "eager" to run PyTorch's own kernels.
    - `mode`, `fullgraph` and `dynamic` are torch.compile's; `options` are settings of
      torch._inductor.config.

    Raises:
        UsageError: a bad value; when `model` is called, also a budget below the least possible,
            which the message names. Nothing has been compiled or stored then.
    """
    from storm_client.compile import backend

    asked = {"budget": budget, "codec": codec, "min_bytes": min_bytes, "codegen": codegen}
    return backend.compiled(
        model, client, mode, {**asked, **(options or {})}, fullgraph=fullgraph, dynamic=dynamic
    )


def compiled_plans(model: Callable[..., Any]) -> list[Plan]:
    """Return the plan of each graph that was compiled so far for `model`.

    `model` is a result of `compile`, or of torch.compile with backend="stormd".

    Raises:
        UsageError: `model` is something else, or torch.compile's and was not called yet.
    """
    from storm_client.compile import backend

    return backend.plans_of(model)


def compiled_stats(model: Callable[..., Any]) -> OffloadStats:
    """Return what a result of `compile` has done so far, waiting up to a second for its stores.

    Of a result of torch.compile with backend="stormd" it is what all those of this process have
    done that were compiled with the same budget, codec and min_bytes.

    Raises:
        UsageError: `model` is something else, or torch.compile's and was not called yet.
    """
    from storm_client.compile import backend

    return backend.stats_of(model)
