"""What tests of the tier on disk need of the machine they run on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from stormd.errors import SpillUnavailable
from stormd.spill.file import SpillFile

__all__ = ["ENCRYPT", "ENCRYPTIONS", "skip_without_disk"]

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
