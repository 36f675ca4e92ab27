"""A private daemon, for scripts on machines where nobody runs one.

It serves one process and whoever is told the address, and its pool grows as it is used. It ends
with its last client and takes its files with it, so nothing has to be cleaned up when this process
is killed. All clients of a process that ask for no other share one.
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
from stormd.protocol import private_pool_commit, temporary_directory, unknown_variables

__all__ = ["EmbeddedDaemon", "shared_daemon"]

START_SECONDS = 60.0
"""For a daemon that is told to pin its pool at start: on a slow machine a second a GiB."""

END_SECONDS = 15.0
"""For a daemon to end after its last client did; its own deadline is shorter."""

POLL_SECONDS = 0.02

NOT_FOR_DAEMONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "NOTIFY_SOCKET")
"""Where a script sets the first to 1, as Megatron's do, a daemon's copies and kernels would take
turns. The second is of the script's own manager."""


class EmbeddedDaemon:
    """A daemon process of our own, for so many `users`, each of which closes it once."""

    def __init__(self, pool_bytes: int | None) -> None:
        """Start a daemon with a pool of `pool_bytes`, or of the daemon's default size.

        Raises:
            DaemonUnavailable: it ended before it listened, with what it said.
        """
        socket = f"stormd-{os.getuid()}/{os.urandom(8).hex()}.sock"  # the daemon makes it, 0700
        self.address = f"ipc://{temporary_directory(socket)}/{socket}"
        self.pool_bytes = pool_bytes
        self.users = 1
        self._owner = os.getpid()
        with tempfile.TemporaryFile() as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
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
        """Tell whether it is this process's, lives, and has the pool that is asked for."""
        is_fit = pool_bytes is None or pool_bytes == self.pool_bytes
        return is_fit and os.getpid() == self._owner and self._process.poll() is None

    def resident_bytes(self) -> int:
        """Return what the process has of the machine's memory; 0 once it has ended."""
        with suppress(OSError):  # where it outlives a crash, it is the child of the process here
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            sizes = [Path(f"/proc/{pid}/statm").read_text() for pid in (self.pid, *children)]
            return sum(int(size.split()[1]) for size in sizes) * mmap.PAGESIZE
        return 0

    def kill(self) -> None:
        """End the daemon at once, whoever uses it."""
        self._process.kill()
        self.users = 1
        self.close()

    def close(self) -> None:
        """Wait for the daemon to end, unless others still use it: it ends with the last."""
        self.users -= 1
        if os.getpid() == self._owner and not self.users:  # a forked child has no part in it
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
        """Wait until somebody listens: the daemon binds its sockets when it is ready."""
        deadline = time.monotonic() + START_SECONDS
        while not is_listening(self.address):
            if self._process.poll() is not None:
                raise DaemonUnavailable(
                    f"the embedded daemon ended with status {self._process.returncode}: "
                    f"{_end_of(log)}; for a private daemon, sizes are set by "
                    "connect(pool_bytes=) and STORMD_POOL_BYTES"
                )
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the embedded daemon was not ready within {START_SECONDS:g} s "
                    f"({_end_of(log)}); try a smaller connect(pool_bytes=) or STORMD_POOL_BYTES"
                )
            time.sleep(POLL_SECONDS)


_shared: EmbeddedDaemon | None = None
_lock = threading.Lock()  # protects it, and the users of the daemon in it


def shared_daemon(pool_bytes: int | None) -> EmbeddedDaemon:
    """Return the process's private daemon, with one user more, or start one.

    One with another pool than is asked for, if that is, is not shared.

    Raises:
        DaemonUnavailable: none can be started.
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
    """Begin anew in a child, where a thread that was starting one does not live."""
    global _shared, _lock
    _shared, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _environment() -> dict[str, str]:
    """Return our environment less what a daemon must not have, or would refuse.

    Whoever connects is warned of unknown variables; a script is not to fail by them.
    """
    left_out = {*NOT_FOR_DAEMONS, *unknown_variables(os.environ)}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _end_of(log: IO[bytes]) -> str:
    """Return the last that the daemon said."""
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    return text[-1000:] or "it said nothing"
