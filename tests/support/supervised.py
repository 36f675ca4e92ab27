"""`stormd run` as a process of its own, and every process that came of it.

All that a run starts inherits a mark in its environment, so what is left of it can be found by
asking the kernel, whatever session it is in and whoever its parent is by now.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.waiting import wait_until

MARK = "SUPERVISED_TEST"

RECORDER = """
import os, signal, sys, time
record = open(sys.argv[1], "a", buffering=1)
for number in (1, 2, 3, 10, 12, 15):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: print(number, file=record))
print("ready", os.getpid(), file=record)
while not os.path.exists(sys.argv[1] + ".end"):
    time.sleep(0.01)
"""
"""A command that writes down each signal that it receives."""


@dataclass
class Run:
    """A run in flight, in a session and process group of its own."""

    process: subprocess.Popen[str]
    mark: str
    directory: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> tuple[int, str, str]:
        """Wait for it; return exit status, standard output and standard error."""
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err

    def living(self) -> list[psutil.Process]:
        """Return what has come of it and lives."""
        return [one for one in psutil.process_iter() if _is_marked(one, self.mark)]

    def living_named(self, text: str) -> list[psutil.Process]:
        """Return those with a word of their command line that contains the text."""
        return [one for one in self.living() if any(text in word for word in _words(one))]

    def keeper(self) -> psutil.Process:
        """Return the process that starts and ends the others."""
        [keeper] = [
            one for one in psutil.Process(self.pid).children() if os.getpgid(one.pid) == one.pid
        ]
        return keeper

    def assert_nothing_is_left(self) -> None:
        """Wait until no process and no file of it is left."""
        wait_until(lambda: not self.living(), 60.0, lambda: [_words(one) for one in self.living()])
        wait_until(lambda: not list(self.directory.glob("stormd-run-*")), 60.0)


@dataclass
class Recorder:
    """The command that writes signals down."""

    path: Path

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", RECORDER, str(self.path)]

    @property
    def pid(self) -> int:
        self.await_line(bool)
        return int(self._lines()[0].split()[1])

    def signals(self) -> list[int]:
        return [int(line) for line in self._lines()[1:]]

    def await_signal(self, number: signal.Signals) -> None:
        self.await_line(lambda lines: str(int(number)) in lines[1:])

    def await_line(self, condition: Callable[[list[str]], bool]) -> None:
        wait_until(lambda: condition(self._lines()), 60.0, self._lines)

    def end(self) -> None:
        """Have it end with status 0."""
        Path(f"{self.path}.end").touch()

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def start_run(
    directory: Path,
    *arguments: str,
    variables: dict[str, str] | None = None,
    **options: Any,
) -> Run:
    """Start `stormd run` where it finds no daemon and all GPUs are visible.

    Its daemon has a small pool and serves the CPU, unless `variables` say otherwise.
    """
    mark = uuid.uuid4().hex
    environ = {
        **{name: one for name, one in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        "STORMD_DEVICE": "cpu",
        "STORMD_POOL_BYTES": "8MiB",
        "STORMD_CACHE_BYTES": "0",
        "XDG_RUNTIME_DIR": str(directory),
        "TMPDIR": str(directory),
        MARK: mark,
        **(variables or {}),
    }
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-m", "stormd", "run", *arguments],
        env=environ,
        text=True,
        **({"start_new_session": True, "stdin": subprocess.DEVNULL} | streams | options),
    )
    return Run(process, mark, directory)


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        return mark.encode() in environ and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
