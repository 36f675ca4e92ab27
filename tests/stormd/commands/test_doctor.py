"""`stormd doctor`: status and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stormd import cli
from stormd.doctor import Finding


def _with(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    finding = Finding("memory", state, "pool 4 of 3", "buy some")  # type: ignore[arg-type]
    monkeypatch.setattr("stormd.commands.doctor.examine", lambda _config: [finding])


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warn", 0), ("skip", 0), ("fail", 1)])
def test_only_a_failure_fails(
    monkeypatch: pytest.MonkeyPatch, state: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _with(monkeypatch, state)
    assert cli.main(["doctor"]) == status
    shown = capsys.readouterr().out
    assert "pool 4 of 3" in shown
    assert "buy some" in shown


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _with(monkeypatch, "fail")
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert found["checks"][0]["advice"] == "buy some"
    assert "processor" in found["machine"]


def test_real_checks_see_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["doctor", "--json", "--pool-bytes=900TiB", f"--address=ipc://{tmp_path}/s.sock"]
    assert cli.main(line) == 1
    checks = {one["check"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["memory"]["state"] == "fail"
    assert str(tmp_path) in checks["runtime directory"]["detail"]


def test_nothing_is_cut_short_however_narrow_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    line = ["doctor", f"--address=ipc://{tmp_path.anchor}{'d' * 60}/s.sock"]
    cli.main(line)
    assert "\N{HORIZONTAL ELLIPSIS}" not in capsys.readouterr().out
