"""train/command.py: a table and a picture of what was measured, and of what was not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from storm_bench.pictures import draw_train
from storm_bench.train import again, plain_seconds
from storm_bench.train import command as bench_train
from storm_bench.train.command import METHODS, WORKLOADS, print_train
from storm_bench.train.llama import LlamaWorkload
from storm_bench.train.methods import METHODS as THEIR_METHODS
from storm_bench.train.workloads import WORKLOADS as THEIR_WORKLOADS

ROW = {
    "step_seconds": 0.1,
    "forward_seconds": 0.04,
    "backward_seconds": 0.06,
    "peak_bytes": 3 << 30,
    "device_name": "a card",
    "process_device_bytes": None,
}
FIGURES: dict[str, Any] = {
    "device": "cuda",
    "mps": False,
    "workloads": {"W0": {"none": ROW, "trl": {"skipped": "no TRL"}}},
}


def test_names_are_those_of_the_client() -> None:
    assert tuple(THEIR_METHODS) == METHODS
    assert list(THEIR_WORKLOADS) == list(WORKLOADS)
    for name, work in THEIR_WORKLOADS.items():
        said = WORKLOADS[name]
        assert f"{work.layers} layers" in said
        assert f"{work.batch} x {work.length} tokens" in said
        assert f"width {work.width}" in said or work.width == LlamaWorkload(1, 1, 1).width


def test_the_table_has_rows_reasons_and_what_both_processes_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_train(FIGURES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"W0: {WORKLOADS['W0']}, a card, MPS off"
    assert lines[2].split() == ["none", "100.00", "1.00", "40.00", "60.00", "3.00"]
    assert lines[3].split(maxsplit=1) == ["trl", "left out: no TRL"]
    held = {"process_device_bytes": 5 << 30, "daemon_device_bytes": 1 << 30}
    offload = {"offloaded_bytes": 2 << 30, "ratio": 1.5}
    storm = ROW | held | {"step_seconds": 0.12, "offload": offload}
    print_train({**FIGURES, "workloads": {"W0": {"none": ROW | held, "storm": storm}}})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:4]]
    assert lines[0].startswith(
        "step ms x none forward backward peak GiB process GiB daemon GiB total GiB"
    )
    assert lines[1] == "none 100.00 1.00 40.00 60.00 3.00 5.00 1.00 5.00"
    assert lines[2].startswith("storm 120.00 1.20 40.00 60.00 3.00 5.00 1.00 6.00 ")


def test_picture(tmp_path: Path) -> None:
    draw_train(FIGURES, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


COMMAND = [sys.executable, "-m", "stormd.cli", "bench", "train", "--json", "--device=cpu"]
SMALL = ["--workloads=W0", "--methods", "none", "storm", "--steps=1", "--warm-ups=1"]


@pytest.mark.slow
def test_an_interrupted_run_gives_what_it_has() -> None:
    with subprocess.Popen(
        [*COMMAND, *SMALL, "--pool-bytes=16MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr.readline().startswith("W0 none: ")
        process.terminate()
        result = json.loads(process.communicate(timeout=300)[0])
        assert process.returncode == 130
    assert result["figures"]["interrupted"]
    rows = result["figures"]["workloads"]["W0"]
    assert rows["none"]["step_seconds"] > 0
    assert rows["storm"] == {"skipped": "interrupted before"}


@pytest.mark.slow
def test_a_run() -> None:
    done = subprocess.run(
        [*COMMAND, *SMALL, "--pool-bytes=256MiB", "--together"],
        check=False,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["benchmark"] == "train"
    rows = result["figures"]["workloads"]["W0"]
    assert rows["none"]["step_seconds"] > 0
    assert rows["none"]["again_seconds"] > 0  # behind storm
    assert rows["storm"]["offload"]["offloaded_bytes"] > 64 << 20
    assert rows["storm"]["daemon_operations"] > 0
    assert rows["storm"]["daemon_seconds_per_operation"] > 0


class Stopped:
    """A daemon that nothing is asked of."""

    address = "of no daemon"


@pytest.mark.parametrize("together", [False, True])
def test_a_process_that_dies_takes_one_method_with_it(
    monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    program = """
import sys
for method in sys.argv[sys.argv.index("--methods") + 1 :]:
    if method == "dies":
        sys.exit("for a reason")
    print('{"measured": "%s"}' % method, flush=True)
    sys.stdin.readline()
"""
    bench = bench_train._Bench(Stopped(), "cpu", 1, 1, None)  # type: ignore[arg-type]
    monkeypatch.setattr(bench_train._Bench, "_effort", lambda _bench: (0.0, 0))
    monkeypatch.setattr(
        bench_train._Bench,
        "_command",
        lambda _bench, _workload, methods: [sys.executable, "-c", program, "--methods", *methods],
    )
    rows = dict(bench.rows("W0", ["one", "dies", "two"], together=together))
    assert rows == {
        "one": {"measured": "one"},
        "dies": {"skipped": "for a reason"},
        "two": {"measured": "two"},
    }


def test_the_step_without_offload_is_the_mean_of_before_and_behind_all_others() -> None:
    assert plain_seconds({}) is None
    assert plain_seconds({"none": {"skipped": "why"}}) is None
    assert plain_seconds({"none": {"step_seconds": 2.0}}) == 2.0
    rows = {"none": {"step_seconds": 2.0} | again({"step_seconds": 3.0})}
    assert plain_seconds(rows) == 2.5
    assert not again({"skipped": "why"})
