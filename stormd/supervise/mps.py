"""CUDA's Multi-Process Service for one run: whether it is available, and its start and end.

With MPS, the daemon's kernels run beside the trainer's; without it, the two take turns. MPS is
started with pipes of its own, so it serves this run alone and disturbs no other user of the GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from stormd.errors import MpsUnavailable

__all__ = [
    "CONTROL",
    "answers",
    "check_available",
    "control_command",
    "mps_environment",
    "quit_mps",
]

CONTROL: Final = "nvidia-cuda-mps-control"
_SMI: Final = "nvidia-smi"
_PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPES: Final = "/tmp/nvidia-mps"  # noqa: S108 - CUDA's own default
_ASK_SECONDS: Final = 10.0
_SMI_SECONDS: Final = 60.0
"""The driver takes seconds per GPU if nothing has kept it loaded."""


def answers(environ: Mapping[str, str]) -> bool:
    """Return whether MPS runs where this environment's CUDA programs look for it."""
    if not (Path(environ.get(_PIPES) or _DEFAULT_PIPES) / "control").exists():
        return False
    program = _found(CONTROL, environ)
    # A container may have its host's pipes without the program; then the pipes are trusted.
    return program is None or _asked(program, "get_server_list", environ)


def check_available(environ: Mapping[str, str], *, daemon_runs: bool) -> None:
    """Check that MPS can be started and is of use: a running daemon would be outside of it.

    Raises:
        MpsUnavailable: it cannot or is not; the message says why, and what to do.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        raise MpsUnavailable(
            f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides every GPU: unset it, or name some"
        )
    smi = _found(_SMI, environ)
    if smi is None or not _lists_a_gpu(smi, environ):
        why = "there is no nvidia-smi" if smi is None else "nvidia-smi lists no GPU"
        raise MpsUnavailable(f"{why}: on a machine with a GPU, install NVIDIA's driver")
    if _found(CONTROL, environ) is None:
        raise MpsUnavailable(
            f"there is no {CONTROL} on PATH: install the driver's nvidia-compute-utils, or give "
            "the container NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    if daemon_runs:
        raise MpsUnavailable(
            "the daemon that runs already must be under it too: start MPS before that daemon, or "
            "end the daemon, and `stormd run` starts both"
        )


def mps_environment(directory: Path) -> dict[str, str]:
    """Make `directory`'s MPS folders; return the variables by which CUDA programs find that MPS."""
    pipes, logs = directory / "mps", directory / "mps-log"
    for one in (pipes, logs):
        one.mkdir(mode=0o700)
    return {_PIPES: str(pipes), _LOGS: str(logs)}


def control_command(environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs MPS in the foreground, and its environment.

    A server with CUDA_VISIBLE_DEVICES numbers its devices anew, and clients with the same variable
    would not find them. So the server sees all devices.
    """
    own = {name: value for name, value in environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return [_found(CONTROL, environ) or CONTROL, "-f"], own


def quit_mps(environ: Mapping[str, str]) -> bool:
    """Ask the MPS of this environment to end; return whether it took the command."""
    program = _found(CONTROL, environ)
    return program is not None and _asked(program, "quit", environ)


def _found(program: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(program, path=environ.get("PATH"))


def _asked(program: str, question: str, environ: Mapping[str, str]) -> bool:
    """Return whether the control daemon was there to take the command."""
    return _output([program], environ, _ASK_SECONDS, question + "\n") is not None


def _lists_a_gpu(smi: str, environ: Mapping[str, str]) -> bool:
    listed = _output([smi, "-L"], environ, _SMI_SECONDS)
    return listed is not None and listed.startswith("GPU ")


def _output(
    command: list[str], environ: Mapping[str, str], seconds: float, question: str = ""
) -> str | None:
    """Return what a program of NVIDIA's prints; None if it fails, or takes too long."""
    try:
        done = subprocess.run(  # noqa: S603 - NVIDIA's program
            command,
            input=question,
            env=dict(environ),
            text=True,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
