"""Errors for steps that cannot be captured, each with the line of the script that is the cause."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from storm_client.errors import UsageError

__all__ = ["data_dependent", "not_in_place", "script_line", "sets_a_generator"]

_OURS = f"{Path(__file__).parents[1]}/"
"""The prefix of the file names of this package."""


def data_dependent(what: str, error: BaseException | None = None) -> UsageError:
    """Return the error for a step that reads a tensor's content, here or where `error` rose."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    below = [frame.filename for frame in frames[-12:]]
    advice = (
        "use torch.where or a tensor's arithmetic, return the tensor and decide outside, or "
        "compile the model alone with storm.compile"
    )
    if any(name.endswith("amp/grad_scaler.py") for name in below):
        advice = "a GradScaler decides by what gradients hold; train in bfloat16 without one"
    elif any(name.endswith("optim/swa_utils.py") for name in below):
        advice = "call update_parameters() of an average after the step"
    elif any("/torch/optim/" in name for name in below):
        advice = (
            "this optimizer's update branches on how often it was called; pass capturable=True, "
            "or take another"
        )
    return UsageError(
        f"the step reads what a tensor holds ({what}) at {script_line(frames)}: a captured step "
        f"runs the same operations whatever that is; {advice}"
    )


def not_in_place(what: str, how: str) -> UsageError:
    """Return the error for a step that changes a tensor other than by writing to it."""
    return UsageError(
        f"the step {what} ({how}) at {script_line()}, which compile_step does not capture; write "
        "to the tensor with copy_() under torch.no_grad(), or do that outside of the step"
    )


def sets_a_generator() -> UsageError:
    """Return the error for a step that seeds a generator or sets its state."""
    return UsageError(
        f"the step seeds a generator or sets its state, which is seen at {script_line()}: a "
        "captured step draws random numbers from wherever generators are; seed before the step, or "
        "pass what is drawn as an argument"
    )


def script_line(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """Return the innermost line of the call stack that is not PyTorch's or ours."""
    for frame in reversed(traceback.extract_stack() if frames is None else frames):
        if "/torch/" not in frame.filename and not _is_ours(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "an unknown line"


def _is_ours(name: str) -> bool:
    return name.startswith((_OURS, "<"))
