"""Descendants are found, reaped and told apart, whatever they did to get away."""

from __future__ import annotations

import subprocess
import sys

from stormd.supervise.processes import exit_status

ORPHANS = """
import os, subprocess, sys, time
from stormd.supervise.processes import Family, send

family = Family()
first = family.start(["sh", "-c", "(setsid sleep 1000 &) ; exit 3"], environ=os.environ, group=0)
log = open(os.devnull, "w+b")
service = family.start(["sh", "-c", "sleep 1001; :"], environ=os.environ, log=log)
while first.returncode is None or len(family.others([])) < 3:
    family.reap()
    time.sleep(0.01)
assert first.returncode == 3
assert os.getsid(service.pid) == service.pid
[orphan] = family.others([service.pid])
assert orphan.ppid() == os.getpid(), orphan.ppid()
assert orphan.cmdline()[1] == "1000"
while family.others([]):
    send(family.others([]), 9)
    family.reap()
    time.sleep(0.01)
family.reap()
assert service.returncode == -9
print("all ended")
"""


def test_orphans_are_found_and_told_from_services() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "all ended\n", done.stderr


def test_the_status_is_a_shell_s() -> None:
    assert [exit_status(code) for code in (0, 7, -9, -15)] == [0, 7, 137, 143]
