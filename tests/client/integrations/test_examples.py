"""The frameworks' examples run, in the process that has loaded the frameworks already."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import storm_client as storm
from storm_client.connecting import _SHARED, Connected

EXAMPLES = Path(__file__).parents[3] / "client" / "examples"


def printed(
    line: str,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Run an example, with the test's client as the one that the process shares."""
    script, *arguments = line.split()
    pytest.importorskip(script.partition("_")[0], reason="the framework is not installed")
    monkeypatch.setattr(_SHARED, "_connected", Connected(client._supply, None))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["transformers_trainer.py --steps=1", "lightning_fit.py --steps=1"]
)
def test_the_losses_are_the_same_without(
    line: str,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, offloaded = (
        printed(text, client, monkeypatch, capsys) for text in (f"{line} --plain", line)
    )
    assert "stored in the pool" not in plain
    assert "stored in the pool" in offloaded
    losses = [re.findall(r"\bloss\W+([\d.]+)", text) for text in (plain, offloaded)]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]


@pytest.mark.parametrize("line", ["trl_sft.py", "accelerate_loop.py"])
def test_it_prints_what_was_offloaded(
    line: str,
    client: storm.Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(line, client, monkeypatch, capsys)
    found = re.search(r"offloaded +([\d.]+) (MiB|GiB)", text)
    assert found is not None, text
    assert float(found[1]) > 0
