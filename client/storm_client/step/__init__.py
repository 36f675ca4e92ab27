"""Compiles a whole training step into captured graphs under one plan.

Importing this loads no compiler.
"""

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
    """Compile `step`, a function that trains on one batch, into captured graphs under one plan.

        def step(x, y):
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = storm.compile_step(step, budget="12GiB")

    The first call records all operations of the function, forward, backward and update, without
    running them. Each call runs the recorded operations under one plan, which says what is kept,
    offloaded and recomputed. The function's Python code runs only while it is captured. A loop over
    `storm_client.micro_batches` runs as a loop.

    The step is captured again where one of these differs, and the last `captures` are kept:

    - an argument's shape, dtype or plain value, or which arguments share memory;
    - a variable of the function's own, a module's mode or attribute, an optimizer's setting.

    Learning rates, momentum and betas may change at each step. A first step, in which an optimizer
    creates its state, has a capture of its own.

    Parameters, gradients, buffers and optimizer state are changed in place. With codegen "eager"
    they get the same bits as from the function itself. With "inductor" they get the bits of its
    recorded graphs compiled by Inductor without offload, where Inductor's kernels are
    deterministic. Generators advance as without capture. Results carry no autograd graph.

    A run first computes and then changes state. If it raises before the change, only generators
    have changed. Ctrl-C during the change takes effect after it. Only if an operation of the update
    itself fails, for example for lack of memory, is part of the state changed.

    `budget`, `client`, `codec` and `min_bytes` are those of `compile`. `codegen` is "inductor" or
    "eager"; "eager" runs PyTorch's own kernels and compiles nothing.

    Raises:
        UsageError: a bad value. When the result is called, also a step that branches on a tensor's
            content or does something else that cannot be captured; the message names the line.
            No tensor has changed then, and nothing of the capture's is left in objects that can be
            reached from the step's variables and modules.
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
