"""Facts about the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stormd import machine


def test_describe_is_json_with_what_a_figure_needs() -> None:
    assert machine.package_versions(("no-such-package-here",)) == {"no-such-package-here": None}
    facts = json.loads(json.dumps(machine.describe()))
    assert {"date", "command", "processor", "cores", "memory_bytes", "versions"} <= set(facts)
    assert facts["cores"] >= 1
    assert facts["versions"]["torch"]


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


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/job\n",
            {
                "job/memory.max": "1048576\n",
                "job/memory.current": "700000\n",
                "job/memory.stat": "anon 5\nactive_file 100000\ninactive_file 200000\n",
            },
        ),
        (
            "0::/job\n",
            {
                "job/memory.max": "max\n",
                "job/memory.high": "1048576\n",
                "job/memory.current": "500000\n",
            },
        ),
        (
            "0::/job\n",
            {
                "job/memory.max": "9000000\n",
                "job/memory.current": "5\n",
                "memory.max": "1048576\n",
                "memory.current": "500000\n",
            },
        ),
        (
            "4:memory:/job\n",
            {
                "memory/job/memory.limit_in_bytes": "1048576\n",
                "memory/job/memory.usage_in_bytes": "700000\n",
                "memory/job/memory.stat": "inactive_file 9\ntotal_inactive_file 200000\n",
            },
        ),
    ],
    ids=["unified", "high", "above", "first"],
)
def test_what_is_available_is_less_than_the_limit_by_what_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    assert machine.memory_available() == (1 << 20) - 500000


def test_without_cgroups_the_memory_is_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "none")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.memory_limit() == physical
