"""PyTorch's product followed by `ancf.encode`, for every device and dtype."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["probe"]


def probe() -> tuple[bool, str]:
    """Return whether PyTorch is installed, and a description or the reason why not."""
    if find_spec("torch") is None:
        return False, "PyTorch is not installed"
    return True, "PyTorch's product, on any device, then ancf.encode"
