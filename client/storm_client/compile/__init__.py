"""Compiled models: the graphs themselves contain the plan of their saved tensors.

`compile` and the torch.compile backend "stormd" partition AOTAutograd's joint graph with three
choices for each saved value: keep, offload, recompute. `storm_client.step` does so for a whole
training step, its update included. Importing this loads no compiler.
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
    """Compile `model`, a module or function, with the plan of its saved tensors in its graphs.

    Each graph keeps, offloads or recomputes the values that its backward graph needs. Results are
    those of torch.compile without offload, bit for bit where its kernels are deterministic.

    - `budget`: the bytes of saved tensors that may be kept on the device at any moment. "least";
      "fit" (the device's free memory); bytes or a size such as "12GiB", for all graphs together
      that are compiled for this client with that budget, such as blocks compiled one by one; or a
      float, a fraction of the bytes that each graph saves. The default is the value of
      STORMD_BUDGET, else "least". A graph that returns a loss gets at least the least possible.
    - `client`: a result of `storm_client.connect`, by default a client that the process shares. The
      shared client connects when the first tensor is offloaded.
    - `codec`: "ancf" (lossless) or "raw". Tensors of less than `min_bytes` are kept.
    - `codegen`: "inductor", or "eager" to run PyTorch's own kernels.
    - `mode`, `fullgraph` and `dynamic` are torch.compile's; `options` are settings of
      torch._inductor.config.

    Raises:
        UsageError: a bad value. When `model` is called, also a budget below the least possible,
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
        UsageError: `model` is something else, or a result of torch.compile that was not called yet.
    """
    from storm_client.compile.backend import compiled_of

    return [graph.plan for graph in compiled_of(model).graphs]


def compiled_stats(model: Callable[..., Any]) -> OffloadStats:
    """Return the statistics of a result of `compile`, waiting up to a second for stores in flight.

    A result of torch.compile with backend="stormd" shares its statistics with all those of this
    process that were compiled with the same budget, codec and min_bytes.

    Raises:
        UsageError: `model` is something else, or a result of torch.compile that was not called yet.
    """
    from storm_client.compile.backend import compiled_of

    return compiled_of(model).target.stats()
