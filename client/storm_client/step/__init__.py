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

    The first call records all operations of the function, forward, backward and update, without
    running them. Every call runs what was recorded, under one plan of what is kept, offloaded and
    recomputed. So the function's Python code runs only when it is captured; loops over
    `storm_client.micro_batches` are run as loops.

    It is captured again where one of these differs, and the last `captures` are kept:

    - an argument's shape, dtype or plain value, or which arguments share memory;
    - a variable of the function's own, a module's mode or attribute, an optimizer's setting.

    Learning rates, momentum and betas may change at each step. What an optimizer makes in its first
    step is made by a capture of its own.

    Parameters, gradients, buffers and the state of optimizers are changed in place. With codegen
    "eager" they have the bits of the function itself; with "inductor" those of its recorded graphs
    compiled by Inductor without offload, where its kernels are deterministic. Generators advance as
    without capture. Results carry no autograd graph.

    A run computes first and changes state last. If it raises before that, nothing has changed but
    generators; Ctrl-C during the change waits for its end. Only if an operation of the update
    itself fails, as for want of memory, is part of the state changed.

    `budget`, `client`, `codec` and `min_bytes` are those of `compile`; `codegen` is "inductor" or
    "eager", which runs PyTorch's own kernels and compiles nothing.

    Raises:
        UsageError: a bad value; when the result is called, also a step that branches on what a
            tensor holds, or does something else that cannot be captured: the message names the
            line. Nothing has changed then.
    """
    from storm_client.step.compiled import CompiledStep

    return CompiledStep(
        step,
        budget=budget,
        client=client,
        codec=codec,
        min_bytes=min_bytes,
        codegen=codegen,
        captures=captures,
    )
