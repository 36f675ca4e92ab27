"""Checks the daemon's answers at the end of a backward pass that has used memory early.

Restored memory may be handed out before the daemon has answered: streams wait for the bytes, and
the training thread goes on. Only the host learns, later, whether the bytes are right. So the pass
waits at its end for the answers, and raises if one is a failure, before the script gets its
gradients. Memory is not handed out early if something uses gradients within the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

__all__ = ["Confirmation"]

MAX_PASSES = 64
"""Passes remembered; a pass that an error has ended does not report its end."""

_current_pass = torch._C._current_graph_task_id
_NO_PASS = -1


class Confirmation:
    """The confirmations of one session, whose lock protects them."""

    def __init__(self, confirm: Callable[[int], None]) -> None:
        """Call `confirm` with a pass's number at the pass's end; the pass raises its exceptions."""
        self._confirm = confirm
        self._passes: set[int] = set()

    def begin(self) -> int | None:
        """Register the present backward pass for confirmation; return its number, or None."""
        this = _current_pass()
        if this == _NO_PASS:
            return None
        if this not in self._passes:
            if len(self._passes) >= MAX_PASSES:
                self._passes.clear()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._end, this))
            self._passes.add(this)
        return this

    def _end(self, this: int) -> None:
        self._passes.discard(this)
        self._confirm(this)
