"""All checks together."""

from __future__ import annotations

from pathlib import Path

import pytest

from stormd.config import Config
from stormd.doctor import examine, system


def test_runs_every_check_once_and_gives_advice_where_all_is_not_well(tmp_path: Path) -> None:
    findings = examine(Config(address=f"ipc://{tmp_path}/missing/stormd.sock"))
    names = [finding.check for finding in findings]
    assert len(names) == len(set(names)) == 17
    assert {"C library", "codec", "CUDA driver", "runtime directory"} <= set(names)
    for finding in findings:
        assert finding.detail
        assert finding.advice or finding.state in ("ok", "skip"), finding


def test_a_broken_check_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> None:
        raise OSError("no such kernel")

    monkeypatch.setattr(system, "check_huge_pages", broken)
    findings = examine(Config(address=f"ipc://{tmp_path}/s.sock", pool_bytes=1 << 20))
    failed = [finding for finding in findings if "no such kernel" in finding.detail]
    assert [(one.check, one.state) for one in failed] == [("huge pages", "fail")]
    assert len(findings) == 17
