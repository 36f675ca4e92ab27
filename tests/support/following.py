"""Has steps be followed by Python or by compiled code, and tells which of them were."""

from __future__ import annotations

import pytest
from storm_client import hooks
from storm_client.eager.planned_step import PlannedStep
from storm_client.native import loader as native
from storm_client.native.build import BuildError, build

__all__ = ["PATHS", "Followed", "follow_by"]

PATHS = ("python", "compiled")


class Followed(list[bool]):
    """Of each block, whether compiled code has followed it."""

    left = 0
    """How many of them have done something else than what it expected."""
    may_be_compiled = False
    """Whether compiled code follows those that it can."""


def follow_by(path: str, monkeypatch: pytest.MonkeyPatch) -> Followed:
    """Have all steps be followed by a path, from the first that may be."""
    followed = Followed()
    find = hooks.StepHooks._find_follower

    def noted(self: hooks.StepHooks, *arguments: object) -> object:
        follower = find(self, *arguments)
        followed.append(follower is not None)
        return follower

    leave = PlannedStep.leave_script

    def left(self: PlannedStep) -> None:
        followed.left += 1
        leave(self)

    monkeypatch.setattr(hooks.StepHooks, "_find_follower", noted)
    monkeypatch.setattr(PlannedStep, "leave_script", left)
    if path == "python":
        monkeypatch.setattr(hooks.StepHooks, "_native_counts", lambda *_: None)
        return followed
    try:
        build()
    except BuildError as error:
        pytest.skip(f"no compiled module: {error}")
    if native.module() is None:
        pytest.skip(f"no compiled module: {native.reason()}")
    followed.may_be_compiled = True
    return followed
