"""zoo/command.py: rows in processes of their own, a table and a picture of them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from storm_bench.pictures import draw_zoo
from storm_bench.zoo import METHODS, MODELS
from storm_bench.zoo import command as bench_zoo
from storm_bench.zoo.command import measure_zoo, print_zoo

from stormd import cli
from stormd.errors import NoDaemon

ROWS: list[dict[str, Any]] = [
    {"model": "lora", "method": "none", "ms": 100.0, "peak_gib": 11.6, "beyond_gib": 0.25},
    {"model": "lora", "method": "trl", "skipped": "no trl"},
    {
        "model": "lora",
        "method": "storm",
        "budget": "0.25",
        "ms": 112.0,
        "peak_gib": 5.2,
        "beyond_gib": 0.5,
        "held_gib": 7.1,
        "offloaded_gib": 4.9,
        "replayed_gib": 3.9,
        "settled_steps": 22,
    },
]
FIGURES: dict[str, Any] = {"machine": {"device": "a card", "mps": True}, "rows": ROWS}


def _arguments(*line: str) -> Any:
    return cli.parser().parse_args(["bench", "zoo", *line])


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_zoo(FIGURES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"lora: {MODELS['lora']}, a card, MPS on"
    assert lines[2].split() == ["none", "100.0", "1.00", "11.60", "0.25"]
    assert lines[3].split(maxsplit=1) == ["trl", "left out: no trl"]
    assert " ".join(lines[4].split()) == "storm 0.25 112.0 1.12 5.20 0.50 7.10 4.90 3.90 22"


@pytest.mark.parametrize("rows", [[*ROWS, {**ROWS[0], "model": "vit"}], ROWS[1:2]])
def test_picture(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    draw_zoo(rows, tmp_path / "zoo.svg")
    drawn = (tmp_path / "zoo.svg").read_text()
    for model in {row["model"] for row in rows if "ms" in row}:
        assert f"<!-- {MODELS[model]} -->" in drawn
    assert ("<!-- 0.25 -->" in drawn) == (ROWS[2] in rows)


def test_a_daemon_that_is_named_is_used_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = f"ipc://{tmp_path}/missing/stormd.sock"
    monkeypatch.setenv("STORMD_ADDRESS", named)
    with pytest.raises(NoDaemon, match="/missing"):
        measure_zoo(_arguments("--methods", "storm"))
    with bench_zoo._daemon("cpu", ["none"]) as address:
        assert address == named


PROGRAMS = {
    "warns": "import sys; sys.stderr.write('a warning'); print('noise'); print('{\"ms\": 1}')",
    "dies": "import os; os.kill(os.getpid(), 9)",
    "hangs": "import time; time.sleep(600)",
}


@pytest.mark.parametrize(
    ("program", "row"),
    [
        ("warns", {"ms": 1}),
        ("dies", {"skipped": "its process ended with -9: (no output)"}),
        ("hangs", {"skipped": "not done after 0.1 s"}),
    ],
)
def test_a_row_is_what_its_process_says_or_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, program: str, row: dict[str, Any]
) -> None:
    if program == "hangs":
        monkeypatch.setattr(bench_zoo, "_CHILD_SECONDS", 0.1)
    command = [sys.executable, "-c", PROGRAMS[program]]
    monkeypatch.setattr(bench_zoo, "_command", lambda _wanted, _args: command)
    assert bench_zoo._measured({}, _arguments(), "") == row


SMALL = ["--small", "--models", "llama", "--steps=1", "--warm-ups=3", "--budgets", "least"]
COMMAND = [sys.executable, "-m", "stormd.cli", "bench", "zoo", *SMALL]


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results, picture = tmp_path / "zoo.json", tmp_path / "zoo.png"
    files = ["--json", str(results), "--picture", str(picture)]
    done = subprocess.run(
        [*COMMAND, *files, "--methods", "none", "storm"],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert table[0] == f"llama: {MODELS['llama']}, cpu"
    assert [line.split()[0] for line in table[2:4]] == ["none", "storm"]
    figures = json.loads(results.read_text())
    assert not figures["interrupted"]
    assert figures["machine"]["command"].startswith("stormd bench zoo --small")
    assert {"torch", "transformers"} <= figures["machine"]["versions"].keys()
    none, storm = figures["rows"]
    assert "skipped" not in none | storm
    assert none["loss"] == storm["loss"]
    assert storm["budget"] == "least"
    assert "offloaded_gib" in storm
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_every_method_runs_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    results = tmp_path / "zoo.json"
    done = subprocess.run(
        [*COMMAND, "--json", str(results)], capture_output=True, text=True, timeout=550, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(results.read_text())
    assert figures["machine"]["device"] == torch.cuda.get_device_name()
    rows = {row["method"]: row for row in figures["rows"]}
    assert list(rows) == list(METHODS)
    for method in METHODS:
        if method == "trl" and find_spec("trl") is None:
            assert "trl" in rows[method]["skipped"]
            continue
        assert "skipped" not in rows[method], rows[method]
        assert rows[method]["held_gib"] > rows[method]["peak_gib"] + rows[method]["beyond_gib"]
