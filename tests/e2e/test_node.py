"""`bench.node` gives every figure on the cpu lane; the size of rates is not a test's matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from storm_bench.child_daemon import ChildDaemon

from stormd.query import ADDRESS_VARIABLE

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "bench" / "node.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    figures = tmp_path_factory.mktemp("node") / "node.json"
    flags = ["--pool-bytes=256MiB", "--cache-bytes=0", "--device=cpu", "--workers=2"]
    command = [sys.executable, str(SCRIPT), "--device=cpu", "--clients=2", "--seconds=0.1"]
    with ChildDaemon(flags=[*flags, "--encode-threads=1"]) as daemon:
        environment = os.environ | {ADDRESS_VARIABLE: daemon.address}
        subprocess.run([*command, f"--json={figures}"], check=True, timeout=300, env=environment)
    found: list[dict[str, Any]] = json.loads(figures.read_text())["rows"]
    return found


@pytest.mark.parametrize("measure", ["plain", "daemon raw", "daemon ancf"])
def test_each_device_is_measured_alone_and_with_all(
    rows: list[dict[str, Any]], measure: str
) -> None:
    keys = ("device", "among", "way")
    found = {tuple(row[key] for key in keys): row for row in rows if row["measure"] == measure}
    for device in ("cpu:0", "cpu:1"):
        for among in ("alone", "together"):
            for way in ("out", "back"):
                assert found[device, among, way]["bytes_per_second"] > 0


def test_all_that_clients_save_goes_through_the_daemon(rows: list[dict[str, Any]]) -> None:
    stored = [row["last"] for row in rows if row["measure"] == "daemon ancf"]
    assert {one["bytes"] for one in stored} == {16 << 20}
    assert all(one["stored_bytes"] < one["bytes"] for one in stored)


def test_what_each_process_of_the_daemon_takes_is_told(rows: list[dict[str, Any]]) -> None:
    (use,) = [row["in_a_busy_second"] for row in rows if row["measure"] == "daemon raw, use"]
    assert set(use) == {"operations", "front", "worker 0", "worker 1"}
    assert use["operations"] > 0
