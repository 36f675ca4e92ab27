"""Kills a process while a kernel of its runs, then waits until others can use the GPU again.

    stormd run --mps=on -- python tests/support/killed_in_kernel.py SECONDS

Under CUDA's MPS that takes the contexts of all others with it, the daemon's included. Prints
"usable" once a new process can use the GPU, and then whether the daemon's processes are "others" or
"the same". Where it has a worker a GPU, "served" follows once a training is served.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stormd.errors import NoDaemon
from stormd.query import ADDRESS_VARIABLE, StatusQuery

SPIN = """
import time, torch
torch.cuda._sleep(1 << 40)  # about ten minutes
print("spins", flush=True)
time.sleep(600)
"""
USE = "import torch; torch.ones(1, device='cuda').item()"
TRAINER = Path(__file__).with_name("cuda_trainer.py")


def can_use() -> bool:
    done = subprocess.run([sys.executable, "-c", USE], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def trains(address: str) -> bool:
    command = [sys.executable, str(TRAINER), address, "3"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.split() == ["ready", "same", "same", "same", "done"]


def kill_in_kernel() -> None:
    command = [sys.executable, "-c", SPIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as spinning:
        assert spinning.stdout.readline() == "spins\n"
        spinning.kill()


def pids(address: str) -> list[int]:
    """Return the daemon's workers, itself where it has none, nothing where none answers."""
    try:
        with StatusQuery(address) as query:
            state = query.ask()
    except NoDaemon:
        return []
    return [one["pid"] for one in state.get("workers") or [state]]


def wait_for(what: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            sys.exit(otherwise)


def main() -> None:
    address, seconds = os.environ[ADDRESS_VARIABLE], float(sys.argv[1])
    before = pids(address)
    kill_in_kernel()
    wait_for(can_use, seconds, "no new process can use the GPU")
    print("usable", "the same" if pids(address) == before else "others", sep="\n", flush=True)
    if len(before) > 1:
        wait_for(lambda: trains(address), seconds, "no training is served")
        print("served", flush=True)


if __name__ == "__main__":
    main()
