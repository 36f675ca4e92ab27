"""Lets a test have the GPUs to itself while workers of xdist run others: it measures their memory.

Two file locks do it. Each test of a GPU passes the gate and enters the room. A test that is marked
`alone` waits in the gate until the room is empty, so those that come later wait for it. Runs that
see different GPUs do not wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["gpus"]


@contextmanager
def gpus(*, alone: bool) -> Iterator[None]:
    """Hold the GPUs: together with other tests, or alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace("/", "-")
    place = Path(tempfile.gettempdir(), f"stormd-tests-{os.getuid()}-{visible}")
    with place.with_suffix(".gate").open("w") as gate, place.with_suffix(".room").open("w") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
