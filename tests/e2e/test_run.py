"""`stormd run` around a script that trains: it finds its daemon, and what it saved is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from support.supervised import start_run

SCRIPT = """
import sys, torch, storm_client as storm
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
offload = storm.offload(model, min_bytes=1)
for _ in range(2):
    with offload:
        loss = model(torch.ones(512, 256)).relu().sum()
    loss.backward()
print(offload.stats().offloaded_bytes, len(storm.connect().status().details["workers"]))
sys.exit(5)
"""


def test_a_script_is_served_and_its_status_and_savings_are_told(place: Path) -> None:
    command = ["--pool-bytes=64MiB", "--", sys.executable, "-c", SCRIPT]
    run = start_run(place, *command, variables={"STORMD_WORKERS": "2"})
    status, out, err = run.end()
    assert status == 5, err
    offloaded, workers = map(int, out.split())
    assert offloaded > 0
    assert workers == 2
    assert re.fullmatch(
        r"stormd: offloaded [\d.]+ MiB, stored as [\d.]+ [KM]iB, ratio [\d.]+; "
        r"the pool held at most [\d.]+ [KM]iB of 64.0 MiB\n",
        err,
    )
    run.assert_nothing_is_left()


def test_a_run_whose_standard_error_nobody_reads_comes_to_its_end(place: Path) -> None:
    """What it has to say of savings is lost."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    environ = {**os.environ, "TMPDIR": str(place), "STORMD_DEVICE": "cpu"}
    environ.pop("STORMD_ADDRESS", None)
    command = [sys.executable, "-m", "stormd", "run", "--mps", "off", "--", "sh", "-c", "exit 5"]
    done = subprocess.run(command, stderr=writing, env=environ, timeout=300, check=False)
    assert done.returncode == 5
    for end in (reading, writing):
        os.close(end)
