"""What tests of several frameworks ask: where they train, and what a setting is called."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

name = "cpu"
"""Where they train, or `cuda`: they are configured far from where a test begins."""


def may_keep() -> set[str]:
    """Return why what is saved may stay: on a GPU what is needed at once does."""
    return set() if is_cpu() else {"needed_at_once"}


def is_cpu() -> bool:
    """Tell whether frameworks are to leave accelerators alone."""
    return name == "cpu"


def checkpointing_setting(arguments: type[Any]) -> str:
    """Return what transformers' `arguments` call checkpointing; versions before 5.23 differ."""
    older, newer = "gradient_checkpointing", "activation_checkpointing"
    return newer if newer in {field.name for field in fields(arguments)} else older
