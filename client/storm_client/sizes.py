"""Sizes as texts for people, in the units in which they may be set."""

from __future__ import annotations

from stormd.protocol.sizes import format_apart, format_size

__all__ = ["format_apart", "format_size"]
