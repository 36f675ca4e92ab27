"""The line that says what training saves, once its steps follow their plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import pytest
import storm_client as storm
import torch
from storm_client.eager.step_times import StepTimes
from storm_client.monitoring.stats import StatsRecorder
from storm_client.monitoring.summary import Summary, log_line

MIB = 1 << 20


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("storm_client")
    level = logger.level
    yield logger
    logger.setLevel(level)


class Steps:
    """Steps that last as long each, of which so much becomes of what they save."""

    def __init__(self, *, device_peak: int | None = None) -> None:
        self.recorder = StatsRecorder()
        self.is_comparing = False
        self.lines: list[str] = []
        self._summary = Summary()
        self._clock = 100.0
        self._device_peak = device_peak

    def step(
        self, *, offloaded: int = 0, replayed: int = 0, small: int = 0, budget: int = 0
    ) -> None:
        line = self._summary.step_begins(
            self._clock,
            self.recorder,
            lambda: MIB,  # of small parameters, which are no activations
            lambda: self._device_peak,
            lambda: self.is_comparing,
        )
        self.lines += [] if line is None else [line]
        self._clock += 2.0
        self.recorder.skipped(7 * MIB, "parameter")
        self.recorder.skipped(small, "small")
        self.recorder.skipped(budget, "budget")
        if offloaded:
            self.recorder.saved(offloaded, 0.125)
            self.recorder.offloaded(offloaded, torch.bfloat16)
            self.recorder.stored(offloaded // 2, "window")
            self.recorder.restored(0.25)
        if replayed:
            self.recorder.will_recompute(replayed)
            self.recorder.replayed(0.125)


def test_the_steps_that_follow_the_plan_are_told_of_once() -> None:
    steps = Steps(device_peak=1200 * MIB)
    for _ in range(2):
        steps.step(offloaded=100 * MIB)
    for _ in range(6):
        steps.step(offloaded=40 * MIB, replayed=20 * MIB, small=3 * MIB, budget=8 * MIB)
    (line,) = steps.lines
    assert line == (
        "stormd: a step saves 70.0 MiB of activations: 40.0 MiB offloaded (20.0 MiB of host "
        "memory, ratio 2.00), 20.0 MiB recomputed, 10.0 MiB kept; the GPU's peak so far is 1.2 "
        "GiB; training threads spent 0.5 s of a step's 2 s (25%) on stores, restores and "
        "recomputation (its launches, not what the GPU does); a pool of 64MiB is enough: "
        'connect(pool_bytes="64MiB"), or, of a daemon that you start, --pool-bytes 64MiB'
    )


def test_a_store_of_the_first_steps_may_be_answered_while_nothing_is_offloaded() -> None:
    steps = Steps()
    for _ in range(2):
        steps.step(offloaded=100 * MIB)
    for _ in range(6):
        steps.recorder.stored(10 * MIB, "window")
        steps.step(replayed=60 * MIB)
    (line,) = steps.lines
    assert "saves 60.0 MiB of activations: 0 B offloaded, 60.0 MiB recomputed" in line


def test_a_pool_that_is_enough_takes_what_a_full_one_has_refused() -> None:
    steps = Steps()
    for _ in range(7):
        steps.step(offloaded=100 * MIB)
        steps.recorder.saved(400 * MIB, 0.0)
        steps.recorder.kept(400 * MIB, "pool_full")
    (line,) = steps.lines
    assert "; a pool of 320MiB is enough" in line, "at a ratio of 2, with a quarter to spare"


def test_it_is_told_that_plans_are_compared() -> None:
    steps = Steps()
    steps.is_comparing = True
    for _ in range(7):
        steps.step(offloaded=100 * MIB)
    (line,) = steps.lines
    assert line.endswith("; later steps may follow other plans, and a line will tell of the best")


@pytest.mark.parametrize(("level", "shown"), [("NOTSET", "saved much\n"), ("WARNING", "")])
def test_a_script_without_logging_has_it_on_stderr(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logger: logging.Logger,
    level: str,
    shown: str,
) -> None:
    monkeypatch.setattr(logger, "propagate", False)  # pytest has set up the root logger
    logger.setLevel(level)
    log_line("saved much")
    assert capsys.readouterr() == ("", shown)


def test_a_training_run_says_what_it_saves(
    client: storm.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is asked for at once would stay from the fourth step on, if it is that on this machine.
    monkeypatch.setattr(StepTimes, "turn_seconds", lambda _: math.inf)
    caplog.set_level(logging.INFO, "storm_client")
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    offload = client.offload(net)
    for _ in range(5):
        with offload:
            loss = net(torch.ones(4096, 64)).square().sum()
        loss.backward()
    (message,) = caplog.messages
    assert message.startswith("stormd: a step saves 9.0 MiB of activations: 9.0 MiB offloaded (")
