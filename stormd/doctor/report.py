"""Runs every check for one set of settings.

A check that raises is itself reported as failed, so one broken check never hides the others.
"""

from __future__ import annotations

from collections.abc import Callable

from stormd.config import Config
from stormd.doctor import cuda, installed, system
from stormd.doctor.finding import Finding

__all__ = ["examine"]


def examine(config: Config) -> list[Finding]:
    """Return the findings of all checks, for a daemon with these settings, in a fixed order."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python packages", installed.check_packages),
        ("C library", installed.check_c_library),
        ("codec", installed.check_codec),
        ("compiled client", installed.check_compiled),
        ("memory", lambda: system.check_memory(config)),
        ("locked memory", lambda: system.check_memlock(config)),
        ("huge pages", system.check_huge_pages),
        ("shared memory", system.check_shared_memory),
        ("file descriptors", lambda: system.check_descriptors(config)),
        ("runtime directory", lambda: system.check_runtime_directory(config)),
        ("CUDA driver", lambda: cuda.check_driver(config)),
        ("CUDA IPC", cuda.check_ipc),
        ("expandable segments", cuda.check_expandable),
        ("CUDA MPS", cuda.check_mps),
        ("workers", lambda: cuda.check_workers(config)),
        ("CUDA queues", cuda.check_connections),
        ("encoding products", cuda.check_products),
    ]
    return [_run(name, check) for name, check in checks]


def _run(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - any failure of a check is its finding
        detail = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(name, "fail", detail, "report this as a bug")
