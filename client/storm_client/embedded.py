"""A private daemon, for scripts on machines where no daemon runs.

It serves one process and any other process that gets its address. Its pool grows as it is used. The
daemon ends with its last client and removes its files, so nothing has to be cleaned up when this
process is killed. All clients of a process share one daemon, unless they ask for another pool size.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from storm_client.errors import DaemonUnavailable
from storm_client.transport.handshake import is_listening
from stormd.protocol import (
    daemon_environment,
    private_pool_commit,
    temporary_directory,
    unknown_variables,
)

__all__ = ["EmbeddedDaemon", "shared_daemon"]

START_SECONDS = 60.0
"""Limit for a daemon that pins its pool at start: on a slow machine a second per GiB."""

END_SECONDS = 15.0
"""Limit for a daemon to end after its last client did; the daemon's own deadline is shorter."""

POLL_SECONDS = 0.02


class EmbeddedDaemon:
    """A private daemon process; each of its `users` closes it once."""

    def __init__(self, pool_bytes: int | None) -> None:
        """Start a daemon with a pool of `pool_bytes`; None means the daemon's default size.

        Raises:
            DaemonUnavailable: the daemon ended before it listened, or was not ready in time. The
                message has its last output.
        """
        socket = f"stormd-{os.getuid()}/{os.urandom(8).hex()}.sock"  # the daemon makes it, 0700
        self.address = f"ipc://{temporary_directory(socket)}/{socket}"
        self.pool_bytes = pool_bytes
        self.users = 1
        self._owner = os.getpid()
        with tempfile.TemporaryFile() as log:
            self._process = _Process(
                self._command(pool_bytes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(),
            )
            try:
                self._await_ready(log)
            except BaseException:
                self.kill()
                raise

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._process.pid

    def serves(self, pool_bytes: int | None) -> bool:
        """Return whether this process owns the daemon, it is running, and it has this pool size."""
        is_fit = pool_bytes is None or pool_bytes == self.pool_bytes
        return is_fit and os.getpid() == self._owner and self._process.poll() is None

    def resident_bytes(self) -> int:
        """Return the bytes of the daemon's resident memory; 0 once it has ended."""
        with suppress(OSError):  # to survive crashes, the daemon may be a child of the process
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            sizes = [Path(f"/proc/{pid}/statm").read_text() for pid in (self.pid, *children)]
            return sum(int(size.split()[1]) for size in sizes) * mmap.PAGESIZE
        return 0

    def kill(self) -> None:
        """Kill the daemon at once, even if others use it."""
        self._process.kill()
        self.users = 1
        self.close()

    def close(self) -> None:
        """Drop one user; the last one waits for the daemon to end."""
        self.users -= 1
        if os.getpid() == self._owner and not self.users:  # a forked child does not own it
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)

    def _command(self, pool_bytes: int | None) -> list[str]:
        command = [sys.executable, "-m", "stormd", "serve", "--address", self.address]
        command.append("--exit-with-last-client")
        pool_commit = private_pool_commit(os.environ)
        if pool_commit is not None:
            command += ["--pool-commit", pool_commit]
        if pool_bytes is not None:
            command += ["--pool-bytes", str(pool_bytes)]
        return command

    def _await_ready(self, log: IO[bytes]) -> None:
        """Wait until the daemon listens: it binds its sockets when it is ready."""
        deadline = time.monotonic() + START_SECONDS
        while not is_listening(self.address):
            if self._process.poll() is not None:
                said = _end_of(log)
                if "pool_bytes" in said.lower().replace("-", "_"):  # a script passes no such flag
                    said += (
                        "; for a private daemon, sizes are set by connect(pool_bytes=) and "
                        "STORMD_POOL_BYTES"
                    )
                raise DaemonUnavailable(
                    f"the embedded daemon ended with status {self._process.returncode}: {said}"
                )
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the embedded daemon was not ready within {START_SECONDS:g} s "
                    f"({_end_of(log)}); try a smaller connect(pool_bytes=) or STORMD_POOL_BYTES"
                )
            time.sleep(POLL_SECONDS)


class _Process(subprocess.Popen[bytes]):
    """The daemon's process, which ends by itself if nobody closes the last client."""

    def __del__(self) -> None:
        """Do as Popen, but do not warn that the process is still running."""
        super().__del__(_warn=lambda *_, **__: None)  # type: ignore[call-arg]  # not in its stub


_shared: EmbeddedDaemon | None = None
_lock = threading.Lock()  # protects _shared, and the users of its daemon


def shared_daemon(pool_bytes: int | None) -> EmbeddedDaemon:
    """Return the process's private daemon with one more user, or start one.

    A daemon with another pool size than the requested one is not shared; None accepts any size.

    Raises:
        DaemonUnavailable: no daemon can be started.
    """
    global _shared  # noqa: PLW0603 - one a process
    with _lock:
        found = _shared
        if found is not None and found.users and found.serves(pool_bytes):
            found.users += 1
            return found
        _shared = EmbeddedDaemon(pool_bytes)
        return _shared


def _forked() -> None:
    """Reset in a forked child, where no thread that was starting a daemon continues."""
    global _shared, _lock
    _shared, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _environment() -> dict[str, str]:
    """Return our environment without the variables that a daemon must not have, or would refuse.

    The script is warned of unknown variables when it connects; they must not make it fail.
    """
    environ = daemon_environment(os.environ)
    for name in unknown_variables(environ):
        del environ[name]
    return environ


def _end_of(log: IO[bytes]) -> str:
    """Return the end of the daemon's output."""
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    return text[-1000:] or "it said nothing"
