"""What tests of the tier on disk need: of the machine they run on, and blobs in a pool."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest

from stormd.errors import SpillUnavailable
from stormd.memory.arena import Block
from stormd.spill.file import SpillFile

__all__ = ["ENCRYPT", "ENCRYPTIONS", "put_bytes", "read_bytes", "skip_without_disk"]

HAS_CRYPTOGRAPHY = find_spec("cryptography") is not None

ENCRYPT = "on" if HAS_CRYPTOGRAPHY else "off"
"""The default, where the package for it is installed."""

ENCRYPTIONS = [
    pytest.param(
        "on",
        marks=pytest.mark.skipif(not HAS_CRYPTOGRAPHY, reason="cryptography is not installed"),
    ),
    "off",
]


def skip_without_disk(directory: Path) -> None:
    """Skip where the directory is on a file system that the tier refuses, as those in memory."""
    try:
        SpillFile(directory, 1 << 20).close()
    except SpillUnavailable as error:
        pytest.skip(str(error))


def put_bytes(address: int, block: Block, data: bytes) -> None:
    """Write what a block holds into the pool at an address."""
    done = 0
    for offset, nbytes in block.used_extents():
        ctypes.memmove(address + offset, data[done : done + nbytes], nbytes)
        done += nbytes


def read_bytes(address: int, block: Block) -> bytes:
    """Return what a block holds in the pool at an address."""
    return b"".join(
        ctypes.string_at(address + offset, nbytes) for offset, nbytes in block.used_extents()
    )
