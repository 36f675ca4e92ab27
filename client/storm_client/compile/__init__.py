"""Compiled models: the plan of what is saved stands inside the graphs.

`compile` and the backend "stormd" of torch.compile have AOTAutograd's joint graph divided with
three choices for each saved value: keep, offload, compute again; `compile_step` does so for a whole
step of training, its update included. Importing this loads no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from storm_client.client import Client
    from storm_client.monitoring.stats import OffloadStats
    from storm_client.planner.plan import Plan
    from storm_client.step.compiled import CompiledStep

__all__ = ["compile", "compile_step", "compiled_plans", "compiled_stats"]

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

    Each graph keeps, offloads or computes again what its backward graph needs, such that at most
    `budget` of it is on the device at any moment: "least", "fit" (what the device has free), bytes
    or a size as "12GiB" for all graphs together that are compiled for this client with that budget,
    as blocks one by one, or as a float a fraction of what each graph saves; by default what
    STORMD_BUDGET says, else "least". A graph that returns a loss has no less than the least
    possible. Results are those of torch.compile without offload, bit for bit where its kernels are
    deterministic.

    `client` is what `storm_client.connect` returned, by default one that the process shares, which
    is connected when the first value leaves. Tensors of less than `min_bytes` stay. `codec` is
    "ancf" (lossless) or "raw". `codegen` is "inductor", or "eager" to run PyTorch's own kernels.
    The rest is torch.compile's; `options` are settings of torch._inductor.config.

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
    """Return the plan of each graph that a result of `compile` has had compiled so far.

    Raises:
        UsageError: `model` is something else.
    """
    from storm_client.compile import backend

    return backend.plans_of(model)


def compiled_stats(model: Callable[..., Any]) -> OffloadStats:
    """Return what a result of `compile` has done so far, waiting up to a second for its stores.

    Raises:
        UsageError: `model` is something else.
    """
    from storm_client.compile import backend

    return backend.stats_of(model)


def compile_step(
    step: Callable[..., Any],
    *,
    budget: str | float | None = None,
    client: Client | None = None,
    codec: str = "ancf",
    min_bytes: int | str = 1 << 20,
    codegen: str = "inductor",
    captures: int = 8,
) -> CompiledStep:
    """Return `step`, a function that trains on one batch, as captured graphs under one plan.

        def step(x, y):
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = storm.compile_step(step, budget="12GiB")

    The first call for arguments of such shapes, dtypes and plain values records all operations of
    the function, forward, backward and update, without running them; every call runs what was
    recorded, as one plan of what is kept, offloaded and computed again. So its Python code runs
    when it is captured, and not again; loops over `storm_client.micro_batches` stay loops. It is
    captured anew where an argument's shape or plain value differs, or which of them share memory,
    a variable of the function's own, a module's mode or attribute, or an optimizer's setting; the
    last `captures` are kept. Learning rates, momentum and betas may change at each step, as
    schedulers change them. What an optimizer makes in its first step is made by a capture of its
    own.

    Parameters, gradients, buffers and the state of optimizers are changed in place, and have the
    bits that they would have: with codegen "eager" those of the function itself; with "inductor"
    those of its recorded graphs compiled by Inductor without offload, where its kernels are
    deterministic. Generators advance as without capture. Results carry no autograd graph.

    A run computes first and changes state last. If it raises before that, nothing has changed but
    that generators have advanced; Ctrl-C during the change waits for its end. Only if an operation
    of the update itself fails, as for want of memory, is a part of the state changed.

    `budget`, `client`, `codec` and `min_bytes` are those of `compile`; `codegen` is "inductor" or
    "eager", which runs PyTorch's own kernels and compiles nothing.

    Raises:
        UsageError: a bad value; when the result is called, also a step that branches on what a
            tensor holds, or does something else that cannot be captured: the message names the
            line. Nothing has changed then.
    """
    from storm_client.step.compiled import compiled_step

    return compiled_step(
        step,
        budget=budget,
        client=client,
        codec=codec,
        min_bytes=min_bytes,
        codegen=codegen,
        captures=captures,
    )
