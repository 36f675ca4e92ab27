"""The project's environment variables, `STORMD_...`: which exist, and what to say about a typo.

This module knows every variable that any part of the project reads. The daemon refuses to start
with an unknown one; the client warns of it without loading the daemon. A test compares the names
with the daemon's settings and with the sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final

__all__ = [
    "ADVISE_VARIABLE",
    "CLIENT_SETTINGS",
    "PREFIX",
    "SETTINGS",
    "daemon_environment",
    "private_pool_commit",
    "unknown_variables",
]

PREFIX: Final = "STORMD_"

SETTINGS: Final = (
    "address",
    "socket_mode",
    "socket_group",
    "allowed_uids",
    "metrics_address",
    "pool_bytes",
    "pool_commit",
    "cache_bytes",
    "spill_path",
    "spill_bytes",
    "spill_encrypt",
    "spill_threads",
    "resumable",
    "message_bytes",
    "device",
    "workers",
    "staging_bytes_cpu",
    "all_staging_bytes_cpu",
    "staging_bytes_cuda",
    "part_bytes_cpu",
    "part_bytes_cuda",
    "direct_bytes_cuda",
    "link_limit_bytes",
    "encode_threads",
    "max_sessions",
    "max_sessions_per_uid",
    "max_entries_per_session",
    "session_quota_bytes",
    "uid_quota_bytes",
    "session_share_bytes",
    "lease_seconds",
    "resume_seconds",
    "shutdown_seconds",
    "exit_with_last_client",
    "log_format",
    "log_level",
)
"""The daemon's settings, each of which a variable may set; clients and commands read the address.
stormd.config defines what they mean."""

CLIENT_SETTINGS: Final = ("budget", "daemon_uids", "advise", "native")
"""Settings of training scripts that a variable may set; a daemon ignores those that it inherits."""

ADVISE_VARIABLE: Final = f"{PREFIX}ADVISE"
"""The path of the datagram socket at which `stormd advise` listens to the script that it runs."""

_NAMES: Final = SETTINGS + CLIENT_SETTINGS
_VARIABLES: Final = tuple(PREFIX + name.upper() for name in _NAMES)

_NOT_FOR_DAEMONS: Final = (
    "CUDA_DEVICE_MAX_CONNECTIONS",  # Megatron's 1 makes a daemon's copies wait for kernels
    "NOTIFY_SOCKET",  # of the service manager of who starts it
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)

_SERVICE_LINK: Final = re.compile(
    r"STORMD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every pod beside a Service named stormd or stormd-..."""


def daemon_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a daemon that a script or `stormd run` starts."""
    return {name: text for name, text in environ.items() if name not in _NOT_FOR_DAEMONS}


def private_pool_commit(environ: Mapping[str, str]) -> str | None:
    """Return the `pool_commit` for a private daemon, or None if a variable sets it.

    The daemon runs beside its user's other programs, so it takes memory only as it is used.
    """
    return None if environ.get(f"{PREFIX}POOL_COMMIT") else "use"


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return each variable that has our prefix but is unknown, with a line about it."""
    return {
        name: f"variable {name} is no setting{_near(name)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in _VARIABLES and not _SERVICE_LINK.fullmatch(name)
    }


def _near(name: str) -> str:
    """Return the closest known variable, else all. The shared prefix is left out of the match."""
    found = get_close_matches(name.removeprefix(PREFIX).lower(), _NAMES, n=1, cutoff=0.5)
    if found:
        return f": did you mean {PREFIX + found[0].upper()!r}?"
    return f": known are {', '.join(_VARIABLES)}"
