"""Arguments that no benchmark can serve are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stormd import cli
from stormd.commands import arguments

NOWHERE = "create the folder '{}' first"


@pytest.mark.parametrize(
    ("benchmark", "argument", "text"),
    [
        ("train", "--image={}/x.png", NOWHERE),
        ("train", "--image=train.txt", "must end in"),
        ("zoo", "--picture={}/x.png", NOWHERE),
        ("zoo", "--json={}/x.json", "--json"),
    ],
)
def test_what_cannot_be_written_is_refused_at_once(
    benchmark: str, argument: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert cli.main(["bench", benchmark, argument.format(missing)]) == 2
    assert text.format(missing) in capsys.readouterr().err


def test_nothing_is_measured_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "link", "--tensor-bytes=0"]) == 2
    assert "--tensor-bytes is 0" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("benchmark", ["train", "scan", "gemm"])
def test_a_gpu_that_is_not_there_is_refused(
    benchmark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", benchmark, "--device=cuda"]) == 2
    assert "PyTorch finds no GPU here" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda _name: None)
    assert cli.main(["bench", "train", "--image=x.png", "--device=cpu"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
