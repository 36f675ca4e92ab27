"""Describes what a run has saved, in one line, from two states of the daemon."""

from __future__ import annotations

from typing import Any

from stormd.sizes import format_size

__all__ = ["describe_savings"]


def describe_savings(
    before: dict[str, Any] | None, after: dict[str, Any], *, has_failed: bool = False
) -> str:
    """Return a text on what was offloaded between two states, and how full the pool was.

    `before` is None for a daemon that served this run alone. The text is empty if the command
    failed before anything was offloaded.
    """
    raw, stored = (_stored(after, name) - _stored(before, name) for name in _COUNTED)
    if not raw:
        return (
            ""
            if has_failed
            else (
                "nothing was offloaded: if the script trained, does it run its forward pass in "
                "`with offload:`?"
            )
        )
    peak, capacity = (after["pool"][name] for name in ("peak_used_bytes", "capacity_bytes"))
    text = (
        f"offloaded {format_size(raw)}, stored as {format_size(stored)}, ratio {raw / stored:.2f}; "
        f"the pool held at most {format_size(peak)} of {format_size(capacity)}"
    )
    if before is not None:
        return f"{text} since its start; it serves others too"
    refused = after["counters"]["rejected"]["pool_full"]
    if refused:
        text += (
            f" and refused {refused} stores because the pool was full: set a larger --pool-bytes"
        )
    return text


_COUNTED = ("raw_bytes", "blob_bytes")


def _stored(state: dict[str, Any] | None, name: str) -> int:
    """Return the bytes that the daemon has stored, including its predecessors' bytes."""
    if state is None:
        return 0
    earlier = state.get("earlier", {}).get(name, 0)  # workers have no predecessors
    return int(state["throughput"]["store"][name] + earlier)
