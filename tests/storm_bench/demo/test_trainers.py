"""Following child processes: reports, failures, and none left behind."""

from __future__ import annotations

import psutil
import pytest
from storm_bench.demo import trainers
from storm_bench.demo.run import Plan
from storm_bench.demo.trainers import run_trainers

from stormd.errors import ChildFailed

SECONDS = 300.0

TINY = Plan(device="cpu", dtype="bfloat16", steps=2, layers=1, width=32, heads=2, rows=2, length=32)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_failing_trainer_ends_the_others_and_tells_why() -> None:
    before = _children()
    commands = [TINY.arguments(0, None), TINY.arguments(1, "ipc:///no/such/stormd.sock")]
    ended = r"trainer 1 ended with status 1(.|\n)*DaemonUnavailable"
    with pytest.raises(ChildFailed, match=ended):
        run_trainers(commands, lambda *_: None, SECONDS)
    assert _children() == before


def test_the_time_limit_ends_them_all() -> None:
    before = _children()
    with pytest.raises(ChildFailed, match=r"longer than 0\.2 s"):
        run_trainers([TINY.arguments(0, None)], lambda *_: None, 0.2)
    assert _children() == before


def test_names_the_module_that_exists() -> None:
    import importlib.util

    assert importlib.util.find_spec(trainers._MODULE)
