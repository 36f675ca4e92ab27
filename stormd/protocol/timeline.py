"""The timeline page: one shared host page of 64-bit counters per session.

What stays true: a counter never decreases, and each has one writer. Both processes map the page
and register it with CUDA, so that streams write and wait on the counters and both CPUs can read
them. A side that finds its peer dead stores POISON into the counters that its own streams wait
on: every wait (GEQ) is released at once, and the value is not one that work could have reached.
"""

from __future__ import annotations

__all__ = ["PAGE_BYTES", "POISON", "PUBLISHED", "RESTORED", "STORED"]

PAGE_BYTES = 4096

PUBLISHED = 0
"""Byte offset; written by the client: the operations whose input is ready."""

STORED = 64
"""Byte offset; written by the daemon: the stores whose source may be used again."""

RESTORED = 128
"""Byte offset; written by the daemon: the restores whose destination is complete."""

POISON = 1 << 62
"""Far above any real value; below 2^63, so signed and unsigned comparisons agree."""
