"""`bench.node` gives every figure on the cpu lane; the size of rates is not a test's matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from storm_bench.child_daemon import ChildDaemon

from stormd.query import ADDRESS_VARIABLE

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "bench" / "node.py"


def test_each_device_is_measured_alone_and_with_all(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    flags = ["--pool-bytes=256MiB", "--cache-bytes=0", "--device=cpu", "--workers=2"]
    command = [sys.executable, str(SCRIPT), "--device=cpu", "--clients=2", "--seconds=0.1"]
    with ChildDaemon(flags=[*flags, "--encode-threads=1"]) as daemon:
        environment = os.environ | {ADDRESS_VARIABLE: daemon.address}
        subprocess.run([*command, f"--json={path}"], check=True, timeout=300, env=environment)
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    keys = ("measure", "device", "among", "way")
    rates = {tuple(row.get(key) for key in keys): row.get("bytes_per_second") for row in rows}
    measures, devices = ("plain", "daemon raw", "daemon ancf"), ("cpu:0", "cpu:1")
    for key in product(measures, devices, ("alone", "together"), ("out", "back")):
        assert rates[key] > 0, key
    stored = [row["last"] for row in rows if row["measure"] == "daemon ancf"]
    assert {one["bytes"] for one in stored} == {16 << 20}
    assert all(one["stored_bytes"] < one["bytes"] for one in stored)
    (use,) = [row["in_a_busy_second"] for row in rows if row["measure"] == "daemon raw, use"]
    assert set(use) == {"operations", "front", "worker 0", "worker 1"}
    assert use["operations"] > 0
