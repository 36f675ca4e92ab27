"""A cgroup with a limit of memory, where this machine lets a test make one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import pytest
from support.waiting import wait_until

__all__ = ["Cgroup", "limited_memory"]

ROOT = Path("/sys/fs/cgroup")
END_SECONDS = 60.0


class Cgroup:
    """A cgroup at `path`; the processes in it may use so much memory together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def running(self, command: Sequence[str]) -> list[str]:
        """Return the command that is `command` in this cgroup."""
        entering = f"echo $$ > {shlex.quote(str(self.path / 'cgroup.procs'))}"
        return ["sh", "-c", f"{entering}; exec {shlex.join(command)}"]

    def used_bytes(self) -> int:
        """Return what its processes use, with the pages of files."""
        names = ("memory.usage_in_bytes", "memory.current")
        return next(
            int((self.path / name).read_text()) for name in names if (self.path / name).exists()
        )


@contextmanager
def limited_memory(nbytes: int) -> Iterator[Cgroup]:
    """Make a cgroup whose processes have ended when the block ends, or skip the test."""
    first = (ROOT / "memory").is_dir()
    path = (ROOT / "memory" if first else ROOT) / f"stormd-test-{token_hex(4)}"
    limit = path / ("memory.limit_in_bytes" if first else "memory.max")
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error.strerror}")
    try:
        try:
            limit.write_text(str(nbytes))
        except OSError as error:
            pytest.skip(f"no cgroup limits memory here: {error.strerror}")
        yield Cgroup(path)
    finally:
        wait_until(lambda: not (path / "cgroup.procs").read_text(), END_SECONDS)
        path.rmdir()
