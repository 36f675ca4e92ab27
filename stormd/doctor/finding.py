"""The outcome of one check.

A finding that is not "ok" says what to do, unless nothing needs doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "State"]

State = Literal["ok", "warn", "fail", "skip"]
"""warn: works, but slower or with less than is possible; skip: nothing to check here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it."""

    check: str
    state: State
    detail: str
    advice: str = ""
