"""Detects a step that takes numbers from outside PyTorch, which it would do only at its capture.

Draws from Python's generators are detected in any function that the step calls. Draws from NumPy's
cannot be. So the states of its global generator, and of those that the step, modules or their
`forward` read, are compared. An iterator among these variables is always refused.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
from torch import nn

from storm_client.errors import UsageError
from storm_client.hook_stack import untraced
from storm_client.step.variables import generator_state, generator_states, is_iterator

__all__ = ["Draws"]

_DRAWING: Final = ("random", "getrandbits", "seed")
"""All methods by which Python's generators draw. `setstate` is none: Dynamo sets states that it
found."""

_LIBRARY: Final = Path(random.__file__).parent


class Draws:
    """The sources of numbers of one capture."""

    def __init__(self) -> None:
        """Note the state of NumPy's global generator."""
        self._error: UsageError | None = None
        self._objects = [("numpy.random", np.random, generator_state(np.random))]
        """Generators with their names and states."""
        self._functions: list[tuple[Callable[..., Any], Sequence[object], dict[str, Any]]] = []
        """Functions with their arguments, and the states of generators among their variables."""
        self._seen: set[object] = set()

    def check_module(self, module: nn.Module) -> None:
        """Look at the attributes of a called module, and at the variables of its `forward`."""
        kind = type(module).__name__
        for name, value in module.__dict__.items():
            if is_iterator(value):
                raise UsageError(
                    f"the module {kind} has an iterator as its attribute {name!r}, and would take "
                    "from it only when the step is captured; take what comes next outside, and "
                    "pass it as an argument"
                )
            if (state := generator_state(value)) is not None:
                self._objects.append((f"{kind}.{name}", value, state))
        forward = module.forward
        function = getattr(forward, "__func__", forward)
        if function not in self._seen:
            self._seen.add(function)
            self.check_function(forward)

    def check_function(
        self, function: Callable[..., Any], arguments: Sequence[object] = ()
    ) -> None:
        """Look at the variables that a function reads.

        Raises:
            UsageError: there is an iterator among them, or a large array among `arguments`.
        """
        if states := generator_states(function, arguments):
            self._functions.append((function, arguments, states))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Detect draws from Python's generators in this thread."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    @untraced
    def _on_event(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or called.__name__ not in _DRAWING:
            return
        if not isinstance(getattr(called, "__self__", None), random.Random):
            return
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename == random.__file__:
            caller = caller.f_back
        if caller is None or Path(caller.f_code.co_filename).parent == _LIBRARY:
            return
        self._error = self._error or _draws(
            f"a generator of Python's ({caller.f_code.co_filename}:{caller.f_lineno})"
        )
        raise self._error

    def check(self) -> None:
        """Raise UsageError if anything has been drawn."""
        if self._error is not None:
            raise self._error
        for name, value, before in self._objects:
            if generator_state(value) != before:
                raise _draws(repr(name))
        for function, arguments, states in self._functions:
            now = generator_states(function, arguments)
            for name, state in states.items():
                if now.get(name) != state:
                    raise _draws(repr(name))


def _draws(where: str) -> UsageError:
    return UsageError(
        f"the step draws random numbers from {where}, not from PyTorch, and would do so only while "
        "it is captured; draw with torch, or pass the numbers as an argument"
    )
