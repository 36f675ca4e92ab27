"""Code run as another user, who may do nothing: what only root can try."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ANOTHER_UID = 65534
TESTS = Path(__file__).parents[1]

BECOME = f"""
import os
os.setgroups([]); os.setgid({ANOTHER_UID}); os.setuid({ANOTHER_UID})
"""

root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


def as_another_user(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process of another user's that runs `code`, with these in sys.argv[1:].

    Lines of code in front of one that says `BECOME` run before: that user may not read the
    interpreter, nor what it imports.
    """
    return subprocess.Popen(
        [sys.executable, "-c", code.replace("BECOME\n", BECOME), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def let_pass(path: Path) -> None:
    """Let anybody use a socket in a directory of pytest's."""
    path.chmod(0o666)
    directory = path.parent
    while directory.stat().st_uid == os.getuid() and directory != directory.parent:
        if directory.stat().st_mode & 0o111 != 0o111:
            directory.chmod(directory.stat().st_mode | 0o111)
        directory = directory.parent
