"""Facts about the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stormd import machine


def test_describe_is_json_with_what_a_figure_needs() -> None:
    facts = json.loads(json.dumps(machine.describe()))
    assert {"date", "command", "processor", "cores", "memory_bytes", "versions"} <= set(facts)
    assert facts["cores"] >= 1
    assert facts["versions"]["torch"]


def test_a_missing_package_has_no_version() -> None:
    assert machine.package_versions(("no-such-package-here",)) == {"no-such-package-here": None}


@pytest.mark.parametrize(("text", "limited"), [("max\n", False), ("1048576\n", True)])
def test_a_cgroup_limits_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limited: bool
) -> None:
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", tmp_path / "memory.max")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_limit() == (1 << 20 if limited else physical)
