"""The rule that a finding which is not well says what to do."""

from __future__ import annotations

from stormd.config import Config
from stormd.doctor import examine


def test_whatever_is_not_well_comes_with_advice() -> None:
    for finding in examine(Config(address="ipc:///nowhere/stormd/stormd.sock")):
        assert finding.detail
        assert finding.advice or finding.state in ("ok", "skip"), finding
