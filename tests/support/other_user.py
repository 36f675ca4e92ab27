"""Code run as another user, who may do nothing: what only root can try."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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


@contextmanager
def open_directory(mode: int = 0o711) -> Iterator[Path]:
    """Yield a directory that anybody may pass through.

    pytest's own are closed to others each time that another run of pytest starts.
    """
    with tempfile.TemporaryDirectory(prefix="storm-") as name:
        path = Path(name)
        path.chmod(mode)
        yield path


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
def listening_impostor() -> Iterator[tuple[Path, Callable[[], str]]]:
    """Have another user listen at a socket in a directory where anybody may put one, as in /tmp.

    Yields its path, and what returns all that was said to that user by those who have hung up.
    """
    with (
        open_directory(0o1777) as directory,
        as_another_user(IMPOSTOR, str(directory / "impostor")) as process,
    ):
        assert process.stdout.readline() == "listening\n"

        def heard() -> str:
            return process.communicate("\n", timeout=300)[0].strip()

        yield directory / "impostor", heard
