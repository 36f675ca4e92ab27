"""Errors for steps that cannot be captured, each with the line of the script that is the cause."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from linecache import getlines
from pathlib import Path

import torch

from storm_client.errors import UsageError

__all__ = [
    "data_dependent",
    "is_inside",
    "not_in_place",
    "reads_a_generator",
    "script_line",
    "sets_a_generator",
]

_OURS = f"{Path(__file__).parents[1]}/"
"""The prefix of the file names of this package."""

_PYTORCHS = f"{Path(torch.__file__).parent}/"

_MADE = ("<frozen ", "<string>", "<eval_with_key>")
"""What the names of code begin with that Python and PyTorch make. That of an interactive session
also begins with "<"."""

_PYTHONS = f"{Path(traceback.__file__).parent}/"
"""The prefix of the file names of Python's standard library, and of what is installed."""


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
    elif any("/torch/distributions/" in name for name in below):
        advice = "pass validate_args=False to the distribution, which checks what tensors hold"
    elif any(name.endswith("optim/swa_utils.py") for name in below):
        advice = "call update_parameters() of an average after the step"
    elif updates := [name for name in below if "/torch/optim/" in name]:
        is_offered = any("capturable: bool" in line for line in getlines(updates[-1]))
        way = "pass capturable=True, or take another" if is_offered else "take another optimizer"
        advice = f"this optimizer's update branches on how often it was called; {way}"
    elif torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        advice = "leave out detect_anomaly(), which looks for NaN, or give it check_nan=False"
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


def reads_a_generator() -> UsageError:
    """Return the error for a step that reads a generator's seed or state."""
    return UsageError(
        f"the step reads the seed or state of a generator at {script_line()}, and would do so only "
        "while it is captured; read it before the step, and pass it as an argument"
    )


def script_line(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """Return the innermost line of the call stack that is not PyTorch's, Python's or ours."""
    for frame in reversed(traceback.extract_stack() if frames is None else frames):
        if not is_inside(frame.filename) and not _is_pythons(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "an unknown line"


def is_inside(name: str) -> bool:
    """Return whether a file is PyTorch's or ours."""
    return name.startswith((_PYTORCHS, _OURS, *_MADE))


def _is_pythons(name: str) -> bool:
    return name.startswith(_PYTHONS) and "-packages/" not in name


def leaves_behind(where: str) -> UsageError:
    """Return the error for a tensor of a capture that something holds after it."""
    return UsageError(
        f"the step leaves a tensor that it computes in {where}, in which a run could not put its "
        "own; return it, or compute it before the first step"
    )
