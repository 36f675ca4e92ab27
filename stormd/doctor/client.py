"""Checks whether compiled code can follow the steps of training scripts here.

The client's own build program is asked, as a file: it needs the standard library alone, and a
daemon's commands load neither PyTorch nor the client.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from stormd.doctor.finding import Finding

__all__ = ["check_compiled"]

_NAME: Final = "compiled client"

_SECONDS: Final = 30.0


def check_compiled() -> Finding:
    """Check that the module is built, or can be; Python does the same without, slower."""
    spec = find_spec("storm_client")
    if spec is None or spec.origin is None:
        return Finding(_NAME, "skip", "the client is not installed")
    program = Path(spec.origin).parent / "native" / "build.py"
    done = subprocess.run(  # noqa: S603 - this Python and a file of the package
        [sys.executable, str(program), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    if done.returncode == 0:
        return Finding(_NAME, "ok", done.stdout.strip())
    detail = f"Python follows steps, which costs the training thread more: {done.stderr.strip()}"
    advice = "install g++, then `python -m storm_client.native`"
    return Finding(_NAME, "warn", detail, advice)
