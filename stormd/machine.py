"""What this machine is: the facts that a figure needs beside it and a check needs below it.

Nothing here changes the machine, and what cannot be learned is None rather than a guess.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

__all__ = ["describe", "memory_limit", "package_versions"]

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_PACKAGES: Final = ("stormd", "torch", "numpy", "pyzmq", "msgpack", "uvloop")


def memory_limit() -> int:
    """Return the bytes of memory this process may use: the machine's, or its cgroups' if less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_cgroup_limits()])


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


def _cgroup_limits() -> Iterator[int]:
    """Yield the limits of the process's cgroup and of all above it, of either version of cgroups.

    In a container the path may be the host's: then only the one that is mounted at the root is
    found, which is the container's.
    """
    for line in (_read(_OWN_CGROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        own = root / path.lstrip("/")
        for directory in (own, *own.parents):
            limit = _read(directory / name) or ""
            if limit.isdigit():
                yield int(limit)
            if directory == root:
                break


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


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
