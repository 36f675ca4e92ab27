"""The native path: compiled code that follows planned steps, as a twin of the Python code."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Native"]

Native: TypeAlias = Any
"""The compiled module; `_follow.pyi` declares its contents."""
