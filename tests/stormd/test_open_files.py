"""The limit of open files: raised where that is allowed, and noticed before it is met."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from stormd import open_files

RAISED = """
import resource
from stormd.open_files import raise_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


@contextmanager
def _limit(number: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_is_raised_to_what_is_allowed() -> None:
    subprocess.run([sys.executable, "-c", RAISED], check=True)


@pytest.mark.parametrize(("share", "scarce"), [(0.2, False), (0.8, True), (1.1, True)])
def test_half_of_what_may_be_open_is_scarce(share: float, scarce: bool) -> None:
    first = os.open(os.devnull, os.O_RDONLY)
    limit = 2 * (first + 100)
    opened = [first]
    with _limit(limit):
        try:
            while opened[-1] < min(share * limit, limit - 1):
                opened.append(os.dup(first))
            assert open_files.are_scarce() is scarce
        finally:
            for descriptor in opened:
                os.close(descriptor)
