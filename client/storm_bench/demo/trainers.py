"""Runs the demo's trainers as processes, all at once, and follows their steps.

When `run_trainers` returns or raises, none of its processes is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from storm_bench.child_daemon import tail
from stormd.errors import ChildFailed

__all__ = ["OnStep", "Step", "Trained", "run_trainers"]

OnStep = Callable[[int, int, float], None]
"""Called with a trainer's index, the number of its steps done and the last loss."""

_MODULE: Final = "storm_bench.demo.trainer"
_LINE_BYTES: Final = 1 << 20

_MALLOC: Final = "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"
"""Every large tensor gets a mapping of its own, of huge pages, which free returns at once.

Otherwise the heap keeps holes of freed tensors, differently in every run, and the peak of
resident memory would tell of malloc rather than of what the training holds. All trainers of the
demo have it, with offload and without.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave: the loss, a digest of all gradients, and the time of both passes."""

    loss: float
    gradients: str
    seconds: float


@dataclass(slots=True)
class Trained:
    """What one trainer reported; `stats` are OffloadStats as a map, None without offload."""

    steps: list[Step] = field(default_factory=list)
    peak_bytes: int = 0
    device_peak_bytes: int = 0
    stats: dict[str, Any] | None = None


def run_trainers(commands: list[list[str]], on_step: OnStep, timeout: float) -> list[Trained]:
    """Run a trainer for each list of arguments, all at once, and return what they reported.

    Raises:
        ChildFailed: a trainer failed or the time is over; the others have been ended.
    """
    return asyncio.run(_run_all(commands, on_step, timeout))


async def _run_all(commands: list[list[str]], on_step: OnStep, seconds: float) -> list[Trained]:
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_run_one(index, command, on_step))
                for index, command in enumerate(commands)
            ]
    except TimeoutError:
        raise ChildFailed(f"the trainers took longer than {seconds:g} s") from None
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]


async def _run_one(index: int, arguments: list[str], on_step: OnStep) -> Trained:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", _MODULE, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES,
        env={**os.environ, "GLIBC_TUNABLES": _MALLOC},
    )
    try:
        assert process.stderr is not None
        complaints = asyncio.ensure_future(process.stderr.read())
        trained = await _follow(index, process, on_step)
        if await process.wait() != 0:
            text = tail((await complaints).decode(errors="replace"))
            raise ChildFailed(f"trainer {index} ended with status {process.returncode}: {text}")
        return trained
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _follow(index: int, process: asyncio.subprocess.Process, on_step: OnStep) -> Trained:
    assert process.stdout is not None
    trained = Trained()
    async for line in process.stdout:
        report = json.loads(line)
        if report.pop("event") == "step":
            step = Step(report["loss"], report["gradients"], report["seconds"])
            trained.steps.append(step)
            on_step(index, len(trained.steps), step.loss)
        else:
            trained.peak_bytes = report["peak_bytes"]
            trained.device_peak_bytes = report["device_peak_bytes"]
            trained.stats = report["stats"]
    return trained
