"""The examples run, and the one with offload prints what the other prints.

They are those of the repository with smaller sizes, as a person would try them: most of the time
that they take as they are is arithmetic.
"""

from __future__ import annotations

import difflib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from storm_bench.child_daemon import ChildDaemon
from support.scripts import Scripts
from support.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"

Run = Callable[..., list[str]]

SMALLER = {
    "gpt.py": ("ROWS, LENGTH, WIDTH, LAYERS = 5, 16, 128, 256, 4", "= 3, 8, 128, 256, 1"),
    "gpt_offload.py": ("ROWS, LENGTH, WIDTH, LAYERS = 5, 16, 128, 256, 4", "= 3, 8, 128, 256, 1"),
    "fsdp.py": ("ROWS, LENGTH, WIDTH, LAYERS = 4, 4, 256, 256, 4", "= 4, 4, 256, 256, 2"),
    "frozen_teacher.py": ("BATCHES, ROWS, WIDTH = 2, 3, 8, 128, 512", "= 2, 3, 8, 128, 128"),
    "plan_and_report.py": ("STEPS, ROWS, WIDTH, LAYERS = 6, 4096, 256, 4", "= 6, 256, 256, 4"),
    "ternary_digits.py": ("HIDDEN, OUTPUTS, EPOCHS = 64, 1024, 10, 60", "= 64, 256, 10, 30"),
}
"""By example: the line that gives its sizes, and what stands there instead."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the examples, with smaller sizes."""
    folder = tmp_path_factory.mktemp("examples") / "examples"
    shutil.copytree(EXAMPLES, folder)
    for name, (line, sizes) in SMALLER.items():
        text = (folder / name).read_text()
        assert text.count(line) == 1, f"{name} no longer says {line!r}"
        (folder / name).write_text(text.replace(line, f"{line.partition('=')[0]}{sizes}"))
    return folder


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run a script with arguments and environment, and return the lines that it prints."""
    with Scripts() as scripts:
        yield scripts.lines


@pytest.fixture(scope="module")
def lasting() -> Iterator[ChildDaemon]:
    with ChildDaemon(flags=["--pool-bytes=128MiB", "--cache-bytes=8MiB", "--device=cpu"]) as daemon:
        yield daemon


@pytest.fixture
def daemon(lasting: ChildDaemon) -> Iterator[ChildDaemon]:
    """Have a test store something with the module's daemon, and leave nothing there."""
    before = lasting.status()["throughput"]["store"]["operations"]
    yield lasting
    assert lasting.status()["throughput"]["store"]["operations"] > before
    wait_until(lambda: lasting.status()["pool"]["used_bytes"] == 0, found=lasting.status)


def _steps(lines: list[str]) -> list[int]:
    """Return the numbers of the steps whose losses are told, one a line."""
    told = [re.fullmatch(r"step (\d): loss (\d+\.\d+)", line) for line in lines]
    return [int(one[1]) for one in told if one is not None]


def test_offload_prints_the_same_losses(examples: Path, run: Run, daemon: ChildDaemon) -> None:
    plain = run(examples / "gpt.py")
    assert _steps(plain) == [0, 1, 2]
    assert run(examples / "gpt_offload.py", STORMD_ADDRESS=daemon.address) == plain


def test_the_compiled_example_offloads_inside_its_graph(
    examples: Path, run: Run, daemon: ChildDaemon
) -> None:
    lines = run(examples / "compiled_gpt.py", "least", "eager", STORMD_ADDRESS=daemon.address)
    assert _steps(lines) == [0, 1, 2]
    assert any(line.startswith("offload ") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled_gpt.py", "step_gpt.py"])
def test_examples_with_generated_code_run_as_they_are_started(
    name: str, examples: Path, run: Run, daemon: ChildDaemon
) -> None:
    assert _steps(run(examples / name, STORMD_ADDRESS=daemon.address)) == [0, 1, 2]


@pytest.mark.slow
def test_the_captured_step_prints_the_losses_of_the_function(
    examples: Path, run: Run, daemon: ChildDaemon
) -> None:
    plain = run(examples / "step_gpt.py", "least", "none")
    assert _steps(plain) == [0, 1, 2]
    lines = run(examples / "step_gpt.py", "least", "eager", STORMD_ADDRESS=daemon.address)
    assert lines[: len(plain)] == plain
    assert any(line.startswith("temporaries: ") for line in lines)


def test_fed_batches_leave_the_generator_of_dropout_alone(
    examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else the Feeder's thread takes numbers of it while the step does, and losses vary by chance
    monkeypatch.syspath_prepend(examples)
    batches = runpy.run_path(str(examples / "compiled_gpt.py"))["batches"]
    sys.modules.pop("gpt")
    before = torch.get_rng_state()
    data = torch.arange(1000)
    one, other = ([x.tolist() for x, _ in batches(data)] for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert one == other


@pytest.mark.slow
def test_two_students_share_the_teachers_outputs(
    examples: Path, run: Run, daemon: ChildDaemon
) -> None:
    before = daemon.status()["cache"]["counters"]
    *students, cache = run(examples / "frozen_teacher.py", STORMD_ADDRESS=daemon.address)
    assert [line.split(":")[0] for line in sorted(students)] == ["student 0", "student 1"]
    assert cache.startswith("cache: 8 tensors in ")
    after = daemon.status()["cache"]["counters"]
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    assert hits + misses == 48
    assert hits >= 32, "each student finds everything from its second epoch on"


@pytest.mark.slow
def test_layers_with_decay_copy_selectively_and_plain_sums_do_not(examples: Path, run: Run) -> None:
    short = ("copy", "--length=48", "--steps=220")
    share = [run(examples / "ar_ssm.py", *short, *more)[-1] for more in ((), ("--plain",))]
    with_decay, plain = (float(line.removeprefix("right: ")) for line in share)
    assert with_decay >= 0.99
    assert plain < 0.9


def test_ar_ssm_has_the_same_losses_with_offload(
    examples: Path, run: Run, daemon: ChildDaemon
) -> None:
    few = ("bytes", "--length=64", "--steps=3")
    plain = run(examples / "ar_ssm.py", *few)
    assert len(plain) == 4
    assert run(examples / "ar_ssm.py", *few, "--offload", STORMD_ADDRESS=daemon.address) == plain


def test_a_plan_and_a_report_are_printed_and_drawn(
    examples: Path, run: Run, daemon: ChildDaemon, tmp_path: Path
) -> None:
    drawn = tmp_path / "step.svg"
    lines = run(
        examples / "plan_and_report.py",
        "--budget=0.25",
        f"--draw={drawn}",
        STORMD_ADDRESS=daemon.address,
    )
    rows = [line.split() for line in lines]
    assert sum(int(row[0]) for row in rows if row[1:3] == ["x", "gelu"]) == 4
    assert [line.split()[0] for line in lines if line.startswith("blocks.")] == [
        f"blocks.{number}" for number in range(4)
    ]
    assert "<svg" in drawn.read_text()


def test_the_change_is_an_import_and_two_lines() -> None:
    plain, offload = (
        [line.strip() for line in (EXAMPLES / name).read_text().splitlines()[1:] if line.strip()]
        for name in ("gpt.py", "gpt_offload.py")
    )
    changes = [line for line in difflib.ndiff(plain, offload) if line[0] in "+-"]
    assert sorted(changes) == [
        "+ import storm_client as storm",
        "+ offload = storm.offload(model)",
        "+ with offload:",
    ]


@pytest.mark.slow
def test_ranks_of_fsdp_share_a_daemon(examples: Path, daemon: ChildDaemon) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *run, str(examples / "fsdp.py")],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "STORMD_ADDRESS": daemon.address,
        },
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"step \d, rank \d: loss ", done.stdout)) == 8


@pytest.mark.slow
def test_digits_are_told_apart_by_ternary_values(examples: Path, run: Run) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    found = {}
    for line in run(examples / "ternary_digits.py"):
        kind, right, nbytes = re.fullmatch(r"(\w+): ([\d.]+)% right, ([\d,]+) bytes", line).groups()
        found[kind] = float(right), int(nbytes.replace(",", ""))
    assert found["ternary"][0] >= found["float32"][0] - 2
    assert found["ternary"][1] <= found["float32"][1] / 8


@pytest.mark.slow
def test_a_llama_block_becomes_ternary() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with_arguments = [str(EXAMPLES / "ternary_llama_block.py"), "--width", "128", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, *with_arguments], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    *table, one, sixteen = done.stdout.splitlines()
    assert len(table) == 1 + 7 + 1
    assert one.startswith("1 tokens: float32")
    assert sixteen.startswith("16 tokens: float32")
