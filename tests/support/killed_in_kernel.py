"""Kills a process while a kernel of its runs, then waits until others can use the GPU again.

    stormd run --mps=on -- python tests/support/killed_in_kernel.py SECONDS

Under CUDA's MPS that takes the contexts of all others with it, the daemon's included. Prints "no
fault" where a new process can use the GPU at once; else "usable again" once one can, and, where the
daemon has a worker a GPU, "served" once a training is served again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

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
        assert spinning.stdout is not None
        assert spinning.stdout.readline() == "spins\n"
        spinning.kill()


def main() -> None:
    address, deadline = os.environ[ADDRESS_VARIABLE], time.monotonic() + float(sys.argv[1])
    with StatusQuery(address) as query:
        has_workers = bool(query.ask().get("workers"))
    kill_in_kernel()
    begun = time.monotonic()
    if can_use():
        print("no fault", flush=True)
        return
    while not can_use():
        if time.monotonic() > deadline:
            sys.exit("no new process can use the GPU")
    print("usable again", flush=True)
    print(f"after {time.monotonic() - begun:.1f} s", file=sys.stderr)
    while has_workers and not trains(address):
        if time.monotonic() > deadline:
            sys.exit("no training is served")
    if has_workers:
        print("served", flush=True)
        print(f"after {time.monotonic() - begun:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
