"""Programs of which each rank of a job is a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__all__ = ["rank_processes"]

TESTS = str(Path(__file__).parents[1])


@contextmanager
def rank_processes(
    program: ModuleType, arguments: Sequence[Sequence[str]], gpus: str = ""
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a program once for each rank's arguments; in the end none of them lives."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": os.pathsep.join([TESTS, os.environ["PYTHONPATH"]]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(program.__file__), *of_rank],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for of_rank in arguments
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
