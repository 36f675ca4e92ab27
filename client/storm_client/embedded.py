"""A private daemon, for scripts on machines where nobody runs one.

It serves one process and whoever is told the address. It ends with its last client and takes its
files with it, so nothing has to be cleaned up when this process is killed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO

from storm_client.errors import DaemonUnavailable
from storm_client.handshake import is_listening
from stormd.protocol import temporary_directory, unknown_variables

__all__ = ["EmbeddedDaemon"]

START_SECONDS = 60.0
"""For a daemon to pin its pool; a large pool on a slow machine takes a second a GiB."""

END_SECONDS = 15.0
"""For a daemon to end after its last client did; its own deadline is shorter."""

POLL_SECONDS = 0.02

NOT_FOR_DAEMONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Where a script sets it to 1, as Megatron's do, a daemon's copies and kernels would take turns."""


class EmbeddedDaemon:
    """A daemon process of our own."""

    def __init__(self, pool_bytes: int | None) -> None:
        """Start a daemon with a pool of `pool_bytes`, or of the daemon's default size.

        Raises:
            DaemonUnavailable: it ended before it listened, with what it said.
        """
        socket = f"stormd-{os.getuid()}/{secrets.token_hex(8)}.sock"  # the daemon makes it, 0700
        self.address = f"ipc://{temporary_directory(socket)}/{socket}"
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

    def kill(self) -> None:
        """End the daemon at once, whoever uses it."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Wait for the daemon to end, unless others still use it: it ends with the last."""
        if os.getpid() == self._owner:  # a forked child has no part in it
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)

    def _command(self, pool_bytes: int | None) -> list[str]:
        command = [sys.executable, "-m", "stormd", "serve", "--address", self.address]
        command.append("--exit-with-last-client")
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
                    f"{_end_of(log)}"
                )
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the embedded daemon was not ready within {START_SECONDS:g} s "
                    f"({_end_of(log)}); try a smaller pool_bytes"
                )
            time.sleep(POLL_SECONDS)


def _environment() -> dict[str, str]:
    """Return our environment less what a daemon must not have, or would refuse.

    Whoever connects is warned of unknown variables; a script is not to fail by them.
    """
    left_out = {NOT_FOR_DAEMONS, *unknown_variables(os.environ)}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _end_of(log: IO[bytes]) -> str:
    """Return the last that the daemon said."""
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    return text[-1000:] or "it said nothing"
