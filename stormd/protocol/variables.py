"""The environment variables of the project, `STORMD_...`: which there are, and what a typo means.

Every variable that any part of the project reads is known here, to the daemon, which refuses
another one, and to the client, which warns of it without loading the daemon. A test holds the names
to the daemon's settings and to the sources.
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
What they are is defined in stormd.config."""

CLIENT_SETTINGS: Final = ("budget", "daemon_uids", "advise", "native")
"""What a variable may set for training scripts; a daemon that inherits one passes over it."""

ADVISE_VARIABLE: Final = f"{PREFIX}ADVISE"
"""Where `stormd advise` listens, for the script that it runs: a datagram socket's path."""

_NAMES: Final = SETTINGS + CLIENT_SETTINGS
_VARIABLES: Final = tuple(PREFIX + name.upper() for name in _NAMES)

_SERVICE_LINK: Final = re.compile(
    r"STORMD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes sets in every pod beside a Service that is called stormd, or stormd-something."""


def private_pool_commit(environ: Mapping[str, str]) -> str | None:
    """Return the `pool_commit` to start a private daemon with, None where a variable says it.

    It is beside whatever else its user runs, and takes memory as it is used.
    """
    return None if f"{PREFIX}POOL_COMMIT" in environ else "use"


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like ours and are not, each with a line about it."""
    return {
        name: f"variable {name} is no setting{_near(name)}"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in _VARIABLES and not _SERVICE_LINK.fullmatch(name)
    }


def _near(name: str) -> str:
    """Return the closest known variable, else all; the prefix, which all share, says nothing."""
    found = get_close_matches(name.removeprefix(PREFIX).lower(), _NAMES, n=1, cutoff=0.5)
    if found:
        return f": did you mean {PREFIX + found[0].upper()!r}?"
    return f": known are {', '.join(_VARIABLES)}"
