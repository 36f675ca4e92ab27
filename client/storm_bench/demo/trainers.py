"""Runs the demo's trainers as processes, all at once, and follows their steps.

When `run_trainers` returns or raises, none of its processes is left. A thread per process reads its
output, as Python 3.11's asyncio may wait for ever for a process whose start was interrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from queue import Empty, Queue
from tempfile import TemporaryFile
from threading import Thread
from time import monotonic
from typing import IO, Any, Final

from storm_bench.child_daemon import tail
from storm_bench.devices import FREES_AT_ONCE
from stormd.errors import ChildFailed

__all__ = ["OnStep", "Step", "Trained", "run_trainers"]

OnStep = Callable[[int, int, float], None]
"""Called with a trainer's index, the number of its steps done and the last loss."""

_MODULE: Final = "storm_bench.demo.trainer"


@dataclass(frozen=True, slots=True)
class Step:
    """The results of one step: the loss, a digest of all gradients, and the time of both passes."""

    loss: float
    gradients: str
    seconds: float


@dataclass(slots=True)
class Trained:
    """The report of one trainer; `stats` is OffloadStats as a dict, None without offload."""

    steps: list[Step] = field(default_factory=list)
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    stats: dict[str, Any] | None = None


def run_trainers(commands: list[list[str]], on_step: OnStep, timeout: float) -> list[Trained]:
    """Run a trainer for each list of arguments, all at once, and return what they reported.

    Raises:
        ChildFailed: a trainer failed or `timeout` has passed; the others have been killed.
    """
    end, lines = monotonic() + timeout, Queue[_Line]()
    with ExitStack() as ended:
        trainers = [
            ended.enter_context(_running(index, arguments, lines))
            for index, arguments in enumerate(commands)
        ]
        running = len(trainers)
        while running:
            try:
                index, line = lines.get(timeout=max(0.0, end - monotonic()))
            except Empty:
                raise ChildFailed(f"the trainers took longer than {timeout:g} s") from None
            if line is None:
                trainers[index].check()
                running -= 1
            else:
                trainers[index].reports(line, on_step)
        return [one.trained for one in trainers]


_Line = tuple[int, str | None]
"""A trainer's index and a line of its output; None at the end of the output."""


@dataclass(frozen=True)
class _Trainer:
    index: int
    process: subprocess.Popen[str]
    complaints: IO[str]
    """Its standard error."""
    trained: Trained = field(default_factory=Trained)

    def reports(self, line: str, on_step: OnStep) -> None:
        """Record a line of the trainer's output; for a step, call `on_step`."""
        report, trained = json.loads(line), self.trained
        if report.pop("event") == "step":
            step = Step(report["loss"], report["gradients"], report["seconds"])
            trained.steps.append(step)
            on_step(self.index, len(trained.steps), step.loss)
        else:
            trained.peak_bytes = report["peak_bytes"]
            trained.device_peak_bytes = report["device_peak_bytes"]
            trained.stats = report["stats"]

    def check(self) -> None:
        """Wait for the end of the process, whose output has ended.

        Raises:
            ChildFailed: the trainer has failed.
        """
        status = self.process.wait()
        if status != 0:
            self.complaints.seek(0)
            text = tail(self.complaints.read())
            raise ChildFailed(f"trainer {self.index} ended with status {status}: {text}")


@contextmanager
def _running(index: int, arguments: list[str], lines: Queue[_Line]) -> Iterator[_Trainer]:
    """Run a trainer while the block runs, put its output's lines into the queue, and kill it."""
    with (
        TemporaryFile("w+", errors="replace") as complaints,
        subprocess.Popen(  # noqa: S603 - our own module and flags
            [sys.executable, "-m", _MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=os.environ | FREES_AT_ONCE,
            text=True,
        ) as process,
    ):

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put((index, line))
            lines.put((index, None))

        reader = Thread(target=read, name=f"trainer-{index}", daemon=True)
        try:
            reader.start()
            yield _Trainer(index, process, complaints)
        finally:
            process.kill()
            if reader.ident is not None:  # else its start was interrupted
                reader.join()
