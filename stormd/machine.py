"""What this machine is: the facts that a figure needs beside it and a check needs below it.

What stays true: nothing here changes the machine, and what cannot be learned is None rather
than a guess.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

__all__ = ["describe", "memory_limit", "package_versions"]

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_PACKAGES: Final = ("stormd", "torch", "numpy", "pyzmq", "msgpack", "uvloop")


def memory_limit() -> int:
    """Return the bytes of memory this process may use: the machine's, or its cgroup's if less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def package_versions(names: tuple[str, ...] = _PACKAGES) -> dict[str, str | None]:
    """Return the installed version of each package, None where it is missing."""
    return {name: _version(name) for name in names}


def describe() -> dict[str, Any]:
    """Return processor, cores, memory, kernel, versions, date and command, as JSON values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["stormd", *sys.argv[1:]]),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_limit(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": package_versions(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
