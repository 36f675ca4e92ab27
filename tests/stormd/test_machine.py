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


@pytest.mark.parametrize(
    ("own", "file", "text", "limited"),
    [
        ("0::/\n", "memory.max", "max\n", False),
        ("0::/\n", "memory.max", "1048576\n", True),
        ("0::/job_7/step_0\n", "job_7/step_0/memory.max", "1048576\n", True),
        ("0::/job_7/step_0\n", "job_7/memory.max", "1048576\n", True),
        ("0::/job_7/step_0\n", "job_8/memory.max", "1048576\n", False),
        ("0::/of/the/host\n", "memory.max", "1048576\n", True),
        ("4:cpu,memory:/job\n0::/\n", "memory/job/memory.limit_in_bytes", "1048576\n", True),
        ("4:cpu:/job\n0::/\n", "memory/job/memory.limit_in_bytes", "1048576\n", False),
        ("4:memory:/host\n", "memory/memory.limit_in_bytes", "9223372036854771712\n", False),
    ],
)
def test_a_cgroup_limits_the_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    file: str,
    text: str,
    limited: bool,
) -> None:
    (tmp_path / "own").write_text(own)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_limit() == (1 << 20 if limited else physical)


def test_without_cgroups_the_memory_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "none")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_limit() == physical
