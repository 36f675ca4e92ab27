"""Huge pages for the daemon's mappings, where the kernel has them.

Where it has none, as real-time kernels do, everything works all the same.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["advise_huge_pages"]


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for huge pages; a kernel without them calls that an invalid argument."""
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
