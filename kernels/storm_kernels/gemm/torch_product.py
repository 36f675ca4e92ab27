"""PyTorch's product, then `ancf.encode`: what every device and dtype can do."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["probe"]


def probe() -> tuple[bool, str]:
    """Return whether PyTorch is there."""
    if find_spec("torch") is None:
        return False, "PyTorch is not installed"
    return True, "PyTorch's product, on any device, then ancf.encode"
