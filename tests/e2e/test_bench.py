"""`stormd bench` runs and gives every figure; how large the speeds are is not a test's matter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def _bench(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stormd.cli", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_link_gives_its_figures() -> None:
    result = _bench("link", "--tensors=2", "--tensor-bytes=2MiB", "--rounds=1", "--operations=20")
    assert result["machine"]["command"].startswith("stormd bench link")
    figures = result["figures"]
    assert figures["bytes"] == 4 << 20
    assert figures["kept_bytes"] == 0
    assert figures["offloaded_bytes"] == 4 << 20
    for name in ("link_to_memcpy", "hook_store_seconds", "hook_restore_seconds"):
        assert figures[name] > 0
