"""Checks of the operating system: memory, limits, shared memory and the socket's directory.

Limits are compared with the settings the daemon would run with.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import stat
from pathlib import Path
from typing import Final

from stormd import open_files
from stormd.config import Config
from stormd.doctor.finding import Finding
from stormd.errors import DirectoryUnsafe
from stormd.machine import memory_limit
from stormd.protocol import parse_address
from stormd.runtime_directory import check_directory, denied_users
from stormd.sizes import format_size

__all__ = [
    "check_descriptors",
    "check_huge_pages",
    "check_memlock",
    "check_memory",
    "check_runtime_directory",
    "check_shared_memory",
]

_CAP_IPC_LOCK: Final = 14
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_memory(config: Config) -> Finding:
    """Check that pool and cache fit the machine's or the container's memory."""
    limit = memory_limit()
    detail = f"pool {format_size(config.host_bytes)} of {format_size(limit)}"
    if config.host_bytes > limit:
        return Finding("memory", "fail", detail, "set a smaller --pool-bytes")
    if config.host_bytes > limit * 3 // 4:
        return Finding("memory", "warn", detail, "leave a quarter of the memory to the trainers")
    return Finding("memory", "ok", detail)


def check_memlock(config: Config) -> Finding:
    """Check that the pool may be locked, so that it is never swapped out."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or _may_lock_all():
        return Finding("locked memory", "ok", "unlimited")
    detail = f"limit {format_size(soft)}, pool {format_size(config.host_bytes)}"
    if soft >= config.host_bytes:
        return Finding("locked memory", "ok", detail)
    advice = "`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the systemd unit"
    return Finding("locked memory", "warn", detail, advice)


def check_huge_pages() -> Finding:
    """Check that the kernel gives huge pages where they are advised."""
    try:
        text = _HUGE_PAGES.read_text()
    except OSError:
        return Finding("huge pages", "skip", "this kernel has no transparent huge pages")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        advice = f"echo madvise > {_HUGE_PAGES}"
        return Finding("huge pages", "warn", "transparent huge pages are off", advice)
    return Finding("huge pages", "ok", f"transparent huge pages: {chosen}")


def check_shared_memory() -> Finding:
    """Check that a sealed memfd can be made, mapped and written, as every cpu session needs."""
    advice = "the kernel or the container's seccomp profile must allow memfd_create"
    try:
        descriptor = os.memfd_create("stormd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Finding("shared memory", "fail", f"memfd_create: {error.strerror}", advice)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[:6] = b"stormd"
    except OSError as error:
        return Finding("shared memory", "fail", f"sealed memfd: {error.strerror}", advice)
    finally:
        os.close(descriptor)
    return Finding("shared memory", "ok", "sealed memfd works")


def check_descriptors(config: Config) -> Finding:
    """Check that the hard limit of open files, to which the daemon raises its own, is high enough.

    The daemon ends new connections while half of the permitted files are open.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = open_files.limit_for(config.max_sessions)
    detail = f"limit {hard}, {wanted} wanted for {config.max_sessions} sessions"
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return Finding("file descriptors", "ok", detail)
    advice = f"`ulimit -Hn {wanted}`, or LimitNOFILE={wanted} in the systemd unit"
    return Finding("file descriptors", "warn", detail, advice)


def check_runtime_directory(config: Config) -> Finding:
    """Check that the daemon would accept the socket's directory, or can create it."""
    directory = parse_address(config.address).parent
    name = "runtime directory"
    try:
        facts = directory.stat()
    except FileNotFoundError:
        return _check_creatable(directory)
    except OSError as error:
        detail = f"{directory}: {error.strerror}"
        return Finding(name, "fail", detail, "choose a directory this user may write, --address")
    mode = stat.S_IMODE(facts.st_mode)
    detail = f"{directory}, mode 0{mode:o}, owner {facts.st_uid}"
    try:
        check_directory(directory, config.socket_group)
    except DirectoryUnsafe as error:
        return Finding(name, "fail", detail, str(error))
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding(name, "fail", detail, "choose a directory this user may write, --address")
    denied = denied_users(
        directory,
        socket_mode=config.socket_mode,
        group=config.socket_group,
        uids=config.allowed_uids,
    )
    return Finding(name, "warn" if denied else "ok", detail, denied)


def _check_creatable(directory: Path) -> Finding:
    parent = next(place for place in directory.parents if os.access(place, os.F_OK))
    if os.access(parent, os.W_OK | os.X_OK):
        return Finding("runtime directory", "ok", f"{directory} will be made")
    detail = f"{directory} is missing, and {parent} is not writable"
    return Finding("runtime directory", "fail", detail, "make it, or choose another --address")


def _may_lock_all() -> bool:
    """Return whether the process has CAP_IPC_LOCK, which lifts the limit."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_IPC_LOCK & 1)
    return False
