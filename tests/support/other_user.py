"""Code run as another user, who may do nothing: what only root can try."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


IMPOSTOR = """
import os, socket, sys
BECOME
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen(0)
print("listening", flush=True)
sys.stdin.readline()
listener.setblocking(False)
heard = b""
while True:
    try:
        caller = listener.accept()[0]
    except BlockingIOError:
        break
    caller.settimeout(60.0)
    heard += caller.recv(4096)
print(heard, flush=True)
"""


@contextmanager
def impostor_in(directory: Path) -> Iterator[tuple[Path, Callable[[], str]]]:
    """Have another user listen at a socket in a directory where anybody may put one, as in /tmp.

    Yields its path, and what returns all that was said to that user by those who have hung up.
    """
    path = directory / "impostor"
    directory.chmod(0o1777)
    let_pass(directory)
    directory.chmod(0o1777)
    with as_another_user(IMPOSTOR, str(path)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "listening\n"

        def heard() -> str:
            return process.communicate("\n", timeout=300)[0].strip()

        yield path, heard
