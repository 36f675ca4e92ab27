"""A daemon as a process of its own, as an operator starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from storm_client.transport.handshake import is_listening
from support.waiting import wait_until

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
    wait_until(
        lambda: is_listening(address) or process.poll() is not None, START_SECONDS, log.read_text
    )
    assert process.poll() is None, log.read_text()
    return daemon


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
