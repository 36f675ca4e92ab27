"""A daemon in a process of its own, for the demo and the benchmarks.

The daemon answers once the context is entered. The daemon and its directory are gone once the
context is left, however that happens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Final, Self

from stormd.errors import ChildFailed, NoDaemon
from stormd.protocol import temporary_directory
from stormd.query import StatusQuery

__all__ = ["ChildDaemon", "tail"]

_ANSWER_SECONDS: Final = 0.5
_STATUS_SECONDS: Final = 15.0
"""The machine is busy with the work that the daemon was started for: answers may take seconds."""

_END_SECONDS: Final = 15.0


class ChildDaemon:
    """Starts `stormd serve` on a socket in a temporary directory; a context manager.

    `flags` are added to its command line; `start_seconds` is how long pinning the pool and
    answering the first query may take.

    Raises:
        ChildFailed: on entry, if the daemon ends or stays silent; its log is in the text.
    """

    def __init__(self, *, flags: list[str], start_seconds: float = 60.0) -> None:
        self._flags = flags
        self._start_seconds = start_seconds
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.address = ""

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self._process is not None
        return self._process.pid

    def status(self) -> dict[str, Any]:
        """Return the daemon's state."""
        with StatusQuery(self.address, timeout=_STATUS_SECONDS) as query:
            return query.ask()

    def log_tail(self) -> str:
        """Return the last lines that the daemon has written."""
        assert self._directory is not None
        return tail((Path(self._directory.name) / "log").read_text(errors="replace"))

    def __enter__(self) -> Self:
        below = temporary_directory("stormd-12345678/stormd.sock")
        self._directory = tempfile.TemporaryDirectory(prefix="stormd-", dir=below)
        directory = Path(self._directory.name)
        self.address = f"ipc://{directory / 'stormd.sock'}"
        self._log = (directory / "log").open("w+b")
        command = [sys.executable, "-m", "stormd", "serve", "--address", self.address]
        self._process = subprocess.Popen(  # noqa: S603 - our own module and flags
            [*command, *self._flags], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        try:
            self._await_answer()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemon in order, by force if that takes too long. Twice is fine."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
        if self._directory is not None:
            self._directory.cleanup()

    def _await_answer(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_seconds
        with StatusQuery(self.address, timeout=_ANSWER_SECONDS) as query:
            while not _answers(query):
                if self._process.poll() is not None:
                    raise ChildFailed(f"the daemon ended at its start: {self.log_tail()}")
                if time.monotonic() > deadline:
                    waited = f"{self._start_seconds:g} s"
                    raise ChildFailed(f"no answer within {waited} of start: {self.log_tail()}")
                self._wait_a_moment()

    def _wait_a_moment(self) -> None:
        """Wait a moment before the next query, or until the daemon ends."""
        assert self._process is not None
        try:
            self._process.wait(0.02)
        except subprocess.TimeoutExpired:
            return


def tail(text: str, lines: int = 12) -> str:
    """Return the last lines of a child's output, or a note that there are none."""
    return "\n".join(text.strip().splitlines()[-lines:]) or "(no output)"


def _answers(query: StatusQuery) -> bool:
    try:
        query.ask()
    except NoDaemon:
        return False
    return True
