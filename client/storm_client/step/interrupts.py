"""Delays Ctrl-C past what must be done as a whole, or runs PyTorch's C++ code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupts", "uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.

    Python runs signal handlers only in the main thread, so in other threads there is nothing to
    delay.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[0])


class Interrupts:
    """Delays Ctrl-C past single functions of PyTorch.

    Where these call Python code, as of fake tensors, PyTorch's C++ code may end the process for an
    exception. They are short in a capture. A user's code that they call may not be, such as a hook:
    a second Ctrl-C takes effect at once.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._noted: tuple[int, Any] | None = None
        self._inside = 0
        """How many functions of PyTorch are running, each called by the one before."""

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Delay Ctrl-C while `run` is active, if this is the main thread."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return
        self._before = before
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _note(self, number: int, frame: Any) -> None:
        if self._inside and self._noted is None:
            self._noted = number, frame
        else:
            self._before(number, frame)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a function of PyTorch, and then what was delayed."""
        self._inside += 1
        try:
            return function(*arguments, **options)
        finally:
            self._inside -= 1
            if not self._inside and self._noted is not None:
                noted, self._noted = self._noted, None
                self._before(*noted)
