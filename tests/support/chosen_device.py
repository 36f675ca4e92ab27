"""On which device a framework trains in a test: it is configured far from where the test begins."""

from __future__ import annotations

name = "cpu"
"""Or `cuda`."""


def is_cpu() -> bool:
    """Tell whether frameworks are to leave accelerators alone."""
    return name == "cpu"
