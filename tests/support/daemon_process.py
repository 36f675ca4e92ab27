"""A daemon as a process of its own, as an operator starts it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from storm_bench.child_daemon import ChildDaemon
from storm_client.transport.handshake import is_listening
from support.waiting import wait_until

from stormd.errors import NoDaemon

START_SECONDS = 60.0


@dataclass
class DaemonProcess:
    """A running daemon."""

    process: subprocess.Popen[bytes]
    address: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """End it in order, if it has not ended."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(START_SECONDS)


def start_daemon(directory: Path, *options: str) -> DaemonProcess:
    """Start a daemon that listens in `directory`; returns when it is ready."""
    address = f"ipc://{directory / 'stormd.sock'}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = [sys.executable, "-m", "stormd.cli", "serve", "--address", address]
    command += ["--device", device, *options]
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    daemon = DaemonProcess(process, address)
    mode = next((one.partition("=")[2] for one in options if one.startswith("--socket-mode=")), "")

    def is_ready() -> bool:
        """Lifelines are taken last, and root is let in before all others are."""
        if not (is_listening(address) and (directory / "stormd.sock.lifeline").exists()):
            return process.poll() is not None
        return not mode or stat.S_IMODE((directory / "stormd.sock").stat().st_mode) == int(mode, 8)

    wait_until(is_ready, START_SECONDS, log.read_text)
    assert process.poll() is None, log.read_text()
    return daemon


@contextmanager
def daemons() -> Iterator[Callable[..., DaemonProcess]]:
    """Start daemons with the options given, and end them."""
    started: list[DaemonProcess] = []
    numbers = count()
    with tempfile.TemporaryDirectory(prefix="storm-") as base:  # pytest's own paths are too long

        def make(*options: str) -> DaemonProcess:
            directory = Path(base) / str(next(numbers))
            directory.mkdir(mode=0o700)
            started.append(start_daemon(directory, *options))
            return started[-1]

        yield make
        for daemon in started:
            daemon.stop()


def served_by(daemon: ChildDaemon) -> int:
    """Return the process id of the daemon, once one answers: each may be ended at any time."""
    found: list[int] = []

    def answers() -> bool:
        try:
            found.append(daemon.status()["pid"])
        except NoDaemon:  # it was ended while it was asked
            return False
        return True

    wait_until(answers, START_SECONDS)
    return found[-1]


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
