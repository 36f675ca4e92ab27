"""Finds side effects that a step's capture has left in Python objects, and undoes them.

Such a step is refused, and so is one that counts in its variables.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from storm_client.errors import UsageError
from storm_client.step.interrupts import uninterrupted
from storm_client.step.places import Places
from storm_client.step.recording import Recording
from storm_client.step.refusals import leaves_behind
from storm_client.step.variables import ARGUMENT, compared_variables, functions_of, variables

__all__ = ["Objects"]


class Objects:
    """A step's variables, and what can be reached from them."""

    def __init__(self, step: Callable[..., Any], arguments: Sequence[object]) -> None:
        self._step, self._arguments = step, arguments
        self._variables = variables(step, arguments)
        self._places = Places()
        given = ((f"{ARGUMENT} {number}", one) for number, one in enumerate(arguments))
        self._places.note([*compared_variables(step, arguments), *given])
        for function, owner in functions_of(step):
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            around = [*cells, ("the step", function), ("globals", function.__globals__)]
            self._places.note([*around, ("self", owner)], depth=0)

    def check(self) -> None:
        """Raise UsageError if the capture has changed what a run would not change."""
        now = variables(self._step, self._arguments)
        changed = [name for name in now if self._variables.get(name) != now[name]]
        if changed:
            raise UsageError(
                f"the step changes its variable {changed[0]!r}, but its Python code runs only "
                "when it is captured; return the value, and leave counting to what calls the step"
            )
        self._places.check()

    @staticmethod
    def check_left(recording: Recording) -> None:
        """Raise UsageError if any object of Python's holds a tensor of the capture."""
        if not recording.left():
            return
        gc.collect()  # it may be in a cycle that nothing else refers to
        left = recording.left()
        for holder in gc.get_referrers(*left):  # C++ code alone may hold one for autograd
            if holder is not left and not isinstance(holder, FrameType):
                raise leaves_behind(f"a {type(holder).__name__}")

    def put_back(self) -> None:
        """Take out what the capture has left; Ctrl-C waits for that."""
        with uninterrupted():
            self._places.put_back()
