"""Frames of every kind of wrong leave the daemon as it was, by chance and guided by coverage."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fuzz.daemon_core import DaemonCore
from support.frames import FrameFuzzer

FRAMES = 12_000
CHECK_EVERY = 500
GUIDED_RUNS = 3_000
TESTS = Path(__file__).parents[1]


def test_frames_by_chance() -> None:
    core = DaemonCore()
    fuzzer = FrameFuzzer(1, os.getuid())
    for number in range(FRAMES):
        core.feed(fuzzer.frame())
        if number % CHECK_EVERY == 0:
            core.check()
    core.check()
    assert core.counters.malformed > FRAMES // 10
    assert sum(flow.operations for flow in core.counters.stores.values()) > FRAMES // 100
    assert sum(flow.operations for flow in core.counters.restores.values()) > FRAMES // 1000
    core.close()


@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed")
def test_frames_guided_by_coverage(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.frame_target", f"-runs={GUIDED_RUNS}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {GUIDED_RUNS} runs" in done.stderr
    assert list(tmp_path.iterdir()), "no frame reached a branch that another had not"
