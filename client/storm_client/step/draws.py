"""Detects a step that takes numbers from outside PyTorch, which it would do only at its capture.

Draws from Python's generators are detected in any function that the step calls. Draws from NumPy's
cannot be. So the states of its global generator, and of those that `reachable.py` finds, are
compared: draws of other threads count as the step's. Those of Feeders rest meanwhile.

An iterator has no state to compare. So it is always refused in what the step reads, and in the
attributes of a module that the step calls.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from storm_client.errors import UsageError
from storm_client.hook_stack import untraced
from storm_client.step.reachable import (
    NumPyGenerator,
    generator_of,
    is_iterator,
    reachable_from,
    reachable_from_module,
    state_of,
)
from storm_client.step.refusals import is_inside, reads_a_generator
from storm_client.step.variables import (
    ARGUMENT,
    CONTENT_BYTES,
    code_of,
    compared_variables,
    names_read,
)

__all__ = ["Draws"]

_DRAWING: Final = ("random", "getrandbits", "seed")
"""All methods by which Python's generators draw. `setstate` is none: Dynamo sets states that it
found."""

_OUTSIDE: Final = {
    *("_io", "_multiprocessing", "_queue", "_socket", "_thread", "datetime"),
    *("io", "mmap", "posix", "select", "time"),
}
"""Modules of C's that ask the system, or hold what other threads and processes change."""

_TELLING_NOTHING: Final = {
    *("acquire", "allocate_lock", "close", "flush", "fspath", "get_ident", "perf_counter"),
    *("perf_counter_ns", "put", "release", "sleep", "start_new_thread", "write", "writelines"),
}
"""Functions of theirs, and clocks for measuring, by which a step does not decide."""

_SETTING: Final = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
"""The methods of PyTorch's generators that change them, which `generators.py` detects."""

_RETURNING: Final = ("initial_seed", "get_rng_state", "get_rng_state_all")
"""Functions of PyTorch's that return what a generator's method returns."""

_LIBRARY: Final = Path(random.__file__).parent


class Draws:
    """The sources of numbers of one capture."""

    def __init__(self) -> None:
        """Note the state of NumPy's global generator."""
        self._error: UsageError | None = None
        self._generators: dict[int, tuple[str, NumPyGenerator, str]] = {}
        """Generators with their names and states, by id."""
        self._modules: dict[int, nn.Module] = {}
        """The modules whose attributes were looked at, by id."""
        self._iterators: dict[int, str] = {}
        """The name of an iterator in a module's attributes, by the module's id."""
        self._code: dict[int, object] = {}
        """The functions of modules whose variables were looked at, by id."""
        self._note_generator("numpy.random", np.random)

    def check_step(self, step: Callable[..., Any], arguments: Sequence[object]) -> None:
        """Look at the variables that a step reads, and note all generators before it runs.

        Raises:
            UsageError: there is an iterator among them, or a large array among `arguments`.
        """
        for name, value in compared_variables(step, arguments):
            is_array = isinstance(value, np.ndarray) and value.nbytes > CONTENT_BYTES
            if is_array and name.startswith(ARGUMENT):
                raise UsageError(
                    f"the step gets an array of NumPy's of shape {value.shape}, which would be "
                    "read only when it is captured; pass torch.from_numpy(array)"
                )
        self._check_variables(step, arguments)

    def check_module(self, module: nn.Module, name: str) -> None:
        """Look at a module's attributes, and at the variables of the code that it has by a name.

        Nothing is done where that is no code, or what all modules have, as `parameters`.

        Raises:
            UsageError: there is an iterator among them.
        """
        code = code_of(module, name)
        if code is None:
            return
        self._note_modules(module)
        if id(module) in self._iterators:
            raise _holds_iterator(module, self._iterators[id(module)])
        if id(code) not in self._code:
            self._code[id(code)] = code
            bound = MethodType(code, module) if isinstance(code, FunctionType) else code
            self._note_attributes(module, names_read(bound))
            self._check_variables(bound)

    def _check_variables(
        self, function: Callable[..., Any], arguments: Sequence[object] = ()
    ) -> None:
        for name, value in reachable_from(function, arguments):
            if is_iterator(value):
                raise UsageError(
                    f"the step has an iterator as its variable {name!r}, and would take from it "
                    "only when it is captured; take what comes next outside, and pass it as an "
                    "argument"
                )
            if isinstance(value, nn.Module):
                self._note_modules(value, names_read(function))
            self._note_generator(name, value)

    def _note_modules(self, module: nn.Module, names: Sequence[str] = ()) -> None:
        """Note the generators of a module and its submodules, and which of them hold iterators.

        Raises:
            UsageError: an attribute among `names`, which the step reads, holds an iterator.
        """
        if id(module) in self._modules:
            return
        for one in module.modules():
            if id(one) not in self._modules:
                self._modules[id(one)] = one
                self._note_attributes(one, names)

    def _note_attributes(self, module: nn.Module, names: Sequence[str]) -> None:
        for key, name, value in reachable_from_module(module, names):
            if is_iterator(value):
                if key in names:
                    raise _holds_iterator(module, name)
                self._iterators.setdefault(id(module), name)
            if isinstance(value, nn.Module):
                self._note_modules(value, names)
            self._note_generator(f"{type(module).__name__}.{name}", value)

    def _note_generator(self, name: str, value: object) -> None:
        generator = generator_of(value)
        if generator is not None and id(generator) not in self._generators:
            self._generators[id(generator)] = name, generator, state_of(generator)

    @contextmanager
    def watching(
        self,
        on_call: Callable[[FrameType], object],
        on_return: Callable[[FrameType, Any], object],
        on_asked: Callable[[FrameType, Any], object],
    ) -> Iterator[None]:
        """Detect draws from Python's generators in this thread; report calls and their results."""
        before = sys.getprofile()
        self._on_call, self._on_return, self._on_asked = on_call, on_return, on_asked
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    @untraced
    def _on_event(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._on_call(frame)
        if event == "return":
            self._on_return(frame, called)
        if event != "c_call":
            return
        name, owner = called.__name__, getattr(called, "__self__", None)
        of = called.__module__ or (owner if isinstance(owner, type) else type(owner)).__module__
        if of in _OUTSIDE and name not in _TELLING_NOTHING and not name.startswith("_"):
            self._on_asked(frame, called)
        if isinstance(owner, torch.Generator) and name not in _SETTING:
            self._check_reader(frame)
        if isinstance(owner, random.Random) and name in _DRAWING:
            self._check_drawing(frame)

    def _check_reader(self, frame: FrameType | None) -> None:
        """Refuse a step that reads a generator; PyTorch may, to set it again.

        `generators.py` looks after PyTorch's generator on the host.
        """
        while frame is not None and _is_returning(frame.f_code):
            frame = frame.f_back
        if frame is not None and not is_inside(frame.f_code.co_filename):
            self._error = self._error or reads_a_generator()
            raise self._error

    def _check_drawing(self, frame: FrameType) -> None:
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
        for name, generator, before in self._generators.values():
            if state_of(generator) != before:
                raise _draws(repr(name))


def _is_returning(code: CodeType) -> bool:
    return code.co_name in _RETURNING and "/torch/" in code.co_filename


def _holds_iterator(module: nn.Module, name: str) -> UsageError:
    return UsageError(
        f"the module {type(module).__name__} has an iterator as its attribute {name!r}, and would "
        "take from it only when the step is captured; take what comes next outside, and pass it as "
        "an argument"
    )


def _draws(where: str) -> UsageError:
    return UsageError(
        f"the step draws random numbers from {where}, not from PyTorch, and would do so only while "
        "it is captured; draw with torch, or pass the numbers as an argument"
    )
