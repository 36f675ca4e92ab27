"""What the README says exists: its targets, commands, files, and its two lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def _make_commands() -> list[str]:
    """The README's command lines of make, without their comments."""
    lines = re.findall(r"^    (make .*)$", TEXT, flags=re.MULTILINE)
    return [line.split("#")[0].strip() for line in lines]


@pytest.mark.parametrize("command", _make_commands())
def test_make_targets_exist(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE)
    assert target in MAKEFILE.partition(".PHONY:")[2].splitlines()[0]


def test_the_two_commands_come_first() -> None:
    assert _make_commands()[:2] == ["make demo", "make test"]


def test_it_is_read_in_minutes() -> None:
    assert len(TEXT.split()) <= 800


def _rows() -> dict[str, list[str]]:
    """The cells of the README's table of figures, by workload."""
    table = TEXT.partition("| Workload |")[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {workload: cells for workload, *cells in lines}


def _results(name: str) -> Any:
    return json.loads((ROOT / "tests" / "bench" / "results" / name).read_text())


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says of these rows: means of turns, in milliseconds and in GiB."""
    means = {
        (method, unit): mean(row[unit] for row in rows if row["method"] == method)
        for method in ("none", "checkpoint", "storm")
        for unit in ("ms", "peak_gib")
    }
    times = [f"{value:.0f}" for (_, unit), value in means.items() if unit == "ms"]
    return times + [f"{value:.1f}" for (_, unit), value in means.items() if unit == "peak_gib"]


@pytest.mark.parametrize(
    ("workload", "run"),
    [
        ("GPT, width 4096, 8 layers, 8,192 tokens", 0),
        ("GPT, width 4096, 4 layers, 32,768 tokens", 1),
        ("Llama 8B, 8 layers, 8,192 tokens", 4),
    ],
)
def test_its_tuned_workloads_are_those_of_the_results(workload: str, run: int) -> None:
    assert _rows()[workload] == _cells(_results("in_turns_h100.json")["runs"][run]["rows"])


@pytest.mark.parametrize(
    ("workload", "model"),
    [
        ("Llama, width 2048, 10 layers", "llama"),
        ("the same with LoRA", "lora"),
        ("the same with Liger kernels", "liger"),
        ("Qwen3-MoE, width 1024, 8 layers", "moe"),
        ("ViT-L, 128 images", "vit"),
    ],
)
def test_its_other_workloads_are_those_of_the_results(workload: str, model: str) -> None:
    rows = _results("zoo_h100.json")["rows"]
    assert _rows()[workload] == _cells([row for row in rows if row["model"] == model])


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_two_lines_are_the_examples() -> None:
    block = TEXT.partition("```diff\n")[2].partition("```")[0]
    shown = {line[1:].strip() for line in block.splitlines() if line.startswith("+")}
    example = (ROOT / "client" / "examples" / "gpt_offload.py").read_text()
    for line in ("import storm_client as storm", "offload = storm.offload(model)", "with offload:"):
        assert line in shown
        assert line in example


def test_ci_runs_lint_and_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make lint" in script
    assert "make test" in script
