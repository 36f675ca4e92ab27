"""The coverage-guided target: any bytes as the frame of a client that has a session.

    PYTHONPATH=tests python -m fuzz.frame_target [libFuzzer's options and corpus folders]

Needs atheris (`pip install atheris`). What is found to be new is written into the first corpus
folder named; the starting corpus is made of real frames.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import atheris
from fuzz.daemon_core import DaemonCore
from support.frames import FrameFuzzer

SEEDS = 300
CHECK_EVERY = 64
"""Frames between two looks at all that the daemon holds: looking takes longer than a frame."""


class Target:
    """One daemon that gets frame after frame, so that states build up."""

    def __init__(self) -> None:
        self._core = DaemonCore()
        self._frames = 0

    def __call__(self, frame: bytes) -> None:
        self._core.feed(frame)
        self._frames += 1
        if self._frames % CHECK_EVERY == 0:
            self._core.check()


def instrument(package: str) -> int:
    """Have the branches of a package's functions counted; return the number of functions.

    `atheris.instrument_imports` sees nothing of a package that is installed editable.
    """
    functions = {
        function
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == package
        for function in _functions(vars(module), name)
    }
    for function in functions:
        atheris.instrument_func(function)
    return len(functions)


def _functions(names: dict[str, object], module: str) -> Iterator[FunctionType]:
    """Yield the functions that a module defines, those of its classes among them."""
    for value in names.values():
        found = value.fget if isinstance(value, property) else value
        if getattr(found, "__module__", None) != module:
            continue
        if isinstance(found, FunctionType):
            yield found
        elif inspect.isclass(found):
            yield from _functions(dict(vars(found)), module)


def write_seeds(directory: Path) -> None:
    """Write the starting corpus."""
    fuzzer = FrameFuzzer(seed=0, uid=os.getuid())
    for number in range(SEEDS):
        (directory / f"seed-{number}").write_bytes(fuzzer.frame())


def main() -> None:
    assert instrument("stormd") > 0
    with tempfile.TemporaryDirectory() as seeds:
        write_seeds(Path(seeds))
        atheris.Setup([*sys.argv, seeds], Target())
        atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
