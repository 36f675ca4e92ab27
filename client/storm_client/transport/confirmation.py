"""Ends a backward pass that has used memory early with a look at what the daemon has answered.

Restored memory may be handed out before the daemon has answered: streams wait for the bytes, and
the training thread goes on. Whether the bytes are right is known to the host alone, later. So the
pass ends by waiting for the answers, and raises where one of them is a failure, before a script has
its gradients. Memory is not handed out early where something acts on gradients within the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from storm_client.monitoring.layers import parts_of

__all__ = ["Confirmation", "acts_on_gradients_early"]

MOST_PASSES = 64
"""Passes remembered: one that an error has ended is not heard of again."""

_current_pass = torch._C._current_graph_task_id
_NO_PASS = -1


class Confirmation:
    """Of one session, whose lock protects it."""

    def __init__(self, confirm: Callable[[int], None]) -> None:
        """Have `confirm` called at a pass' end with its number; the pass raises what that does."""
        self._confirm = confirm
        self._passes: set[int] = set()

    def begin(self) -> int | None:
        """Have the present backward pass end with a look; return its number, None without one."""
        this = _current_pass()
        if this == _NO_PASS:
            return None
        if this not in self._passes:
            if len(self._passes) >= MOST_PASSES:
                self._passes.clear()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._end, this))
            self._passes.add(this)
        return this

    def _end(self, this: int) -> None:
        self._passes.discard(this)
        self._confirm(this)


def acts_on_gradients_early(modules: Iterable[torch.nn.Module]) -> bool:
    """Tell whether gradients may be used before the pass that makes them has ended.

    Ranks exchange them, and hooks of parameters may be an optimizer.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    return any(
        parameter._post_accumulate_grad_hooks or parameter._backward_hooks
        for part in parts_of(modules)
        for parameter in part._parameters.values()
        if parameter is not None
    )
