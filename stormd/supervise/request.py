"""What `stormd run` is asked to do: a command, and its services.

An existing Request names a program that can be started and settings that a daemon accepts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stormd.errors import CommandUnusable

__all__ = ["MpsMode", "Request", "find_program"]

MpsMode = Literal["auto", "on", "off"]

EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
"""The exit statuses that shells use."""


@dataclass(frozen=True, slots=True)
class Request:
    """A command and its requirements.

    `addresses` are where a daemon may answer, best first. `own_address` is where one is started if
    none answers; empty means a private place. `daemon_flags` are those of that daemon, and
    `pool_bytes` the pool's size if they name it. `budget` is exported as it was written; None
    leaves the environment unchanged.
    """

    command: tuple[str, ...]
    addresses: tuple[str, ...]
    own_address: str = ""
    pool_bytes: int | None = None
    daemon_flags: tuple[str, ...] = ()
    budget: str | None = None
    mps: MpsMode = "auto"


def find_program(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of the program that a shell would start for `name`.

    Raises:
        CommandUnusable: there is none (exit status 127), or it cannot be executed (126).
    """
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is not None:
        return found
    folders = [""] if "/" in name else environ.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        path = Path(folder, name)
        if name and path.exists():
            why = "a directory" if path.is_dir() else f"not executable: {_started_by(name)}"
            raise CommandUnusable(f"{path} is {why}", EXIT_NOT_EXECUTABLE)
    where = "" if "/" in name else " on PATH"
    advice = "is its environment activated, or its path right?"
    if Path(name).is_file():  # in the current directory, which is not on PATH
        advice = _started_by(f"./{name}")
    raise CommandUnusable(f"there is no command {name!r}{where}: {advice}", EXIT_NOT_FOUND)


def _started_by(name: str) -> str:
    return f"write python {name}" if name.endswith(".py") else f"write {name}, and chmod +x it"
