"""Facts about this machine, to report beside measurements and to base checks on.

Nothing here changes the machine. A fact that cannot be determined is None, never a guess.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

__all__ = ["describe", "memory_available", "memory_limit", "package_versions"]

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_PACKAGES: Final = ("stormd", "torch", "numpy", "pyzmq", "msgpack", "uvloop")


class _Controller(NamedTuple):
    """Names in one version of cgroups: of the limits, the usage, and the droppable memory."""

    limits: tuple[str, ...]
    usage: str
    droppable: str


_UNIFIED: Final = _Controller(("memory.max", "memory.high"), "memory.current", "inactive_file")
_FIRST: Final = _Controller(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
)


def memory_limit() -> int:
    """Return the bytes of memory this process may use: the machine's, or less if a limit is lower.

    Limits are those of its cgroups, and of its address space and data (`ulimit -v` and `-d`).
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _cgroup_limits()), *_resource_limits()])


def memory_available() -> int:
    """Return the bytes that this process can take now before the kernel kills a process."""
    free = (limit - used for limit, used in _cgroup_limits())
    return max(0, min([psutil.virtual_memory().available, *free]))


def package_versions(names: tuple[str, ...] = _PACKAGES) -> dict[str, str | None]:
    """Return the installed version of each package, None if it is missing."""
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


def _resource_limits() -> Iterator[int]:
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage, in bytes, of the process's cgroup and all its parents, v1 and v2.

    In a container the path may be the host's. Then only the cgroup mounted at the root is found,
    and that is the container's.
    """
    for line in (_read(_OWN_CGROUPS) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        names = _FIRST if controllers else _UNIFIED
        own = root / path.lstrip("/")
        for directory in (own, *own.parents):
            limits = [_read(directory / name) or "" for name in names.limits]
            numbers = [int(limit) for limit in limits if limit.isdigit()]
            if numbers:
                yield min(numbers), _in_use(directory, names)
            if directory == root:
                break


def _in_use(directory: Path, names: _Controller) -> int:
    """Return the bytes that a cgroup uses, without file pages that the kernel can drop."""
    rows = (line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
    droppable = sum(int(row[1]) for row in rows if row[0] == names.droppable)
    return max(0, int(_read(directory / names.usage) or 0) - droppable)


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
