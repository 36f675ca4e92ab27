"""A whole step of training as captured graphs under one plan. Importing this loads no compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm_client.client import Client
    from storm_client.step.compiled import CompiledStep

__all__ = ["compile_step"]


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
    recorded, as one plan of what is kept, offloaded and recomputed. So its Python code runs
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
