"""A word to the user that nobody waits long for."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from stormd.output import print_to_stderr

SCRIPT = """
import signal, sys
from stormd.output import print_to_stderr
print_to_stderr("x" * 100_000, 0.01)
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
"""


def test_it_is_one_line_with_the_programs_name(capfd: pytest.CaptureFixture[str]) -> None:
    print_to_stderr("no daemon")
    assert capfd.readouterr().err == "stormd: no daemon\n"


def test_where_nobody_reads_it_is_lost_and_the_process_comes_to_its_end() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=writing, timeout=300, check=False)
    assert done.returncode == 0
    for end in (reading, writing):
        os.close(end)


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=writing, timeout=300, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN, "as Python has it"
