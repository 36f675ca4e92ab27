"""The daemon's errors, by whose fault they are.

A message names the value, the limit and the next step. The call that raised has changed nothing.
"""

from __future__ import annotations

import errno
from typing import Final

__all__ = [
    "AddressInUse",
    "ChildFailed",
    "CommandUnusable",
    "ConfigError",
    "DirectoryUnsafe",
    "LaneUnavailable",
    "MpsUnavailable",
    "NoDaemon",
    "PoolUnavailable",
    "SpillUnavailable",
    "StartStopped",
    "StormdError",
    "UpgradeUnavailable",
    "error_with_remedy",
]

_REMEDIES: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE=), or end a session",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "free memory, or raise the limit of address space (ulimit -v) or of the cgroup",
    errno.ENOSPC: "free room there",
}
"""Remedies for an exhausted resource, whatever needed it."""


def error_with_remedy(error: OSError, otherwise: str) -> str:
    """Return the kernel's message and what to do: `otherwise` unless a resource is exhausted.

    Both are one sentence, so that a lack of memory is not reported as a lack of descriptors.
    """
    return f"{error.strerror or error}: {_REMEDIES.get(error.errno or 0, otherwise)}"


class StormdError(Exception):
    """Base of all errors of the daemon."""


class ConfigError(StormdError):
    """The operator's fault: a setting cannot be used."""


class NoDaemon(StormdError):
    """The environment's fault: no daemon answers at the address."""


class UpgradeUnavailable(StormdError):
    """The operator's fault: a daemon cannot be replaced while trainers use it, or not from here."""


class AddressInUse(StormdError):
    """The operator's fault: another daemon or program uses the address."""


class DirectoryUnsafe(StormdError):
    """The environment's fault: the runtime directory or a file in it is unsafe or unusable."""


class PoolUnavailable(StormdError):
    """The environment's fault: the machine does not provide the memory that the daemon needs."""


class SpillUnavailable(StormdError):
    """The environment's fault: the tier on disk cannot be opened."""


class StartStopped(StormdError):
    """The operator's wish: the daemon was told to end before it was ready."""


class LaneUnavailable(StormdError):
    """The environment's fault: a lane cannot be opened, or takes no further session or segment."""


class ChildFailed(StormdError):
    """A process that a command started or waited for did not do its work."""


class CommandUnusable(StormdError):
    """The user's fault: the command of `stormd run` cannot be started."""

    def __init__(self, text: str, exit_status: int) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class MpsUnavailable(StormdError):
    """The environment's fault: CUDA MPS is not available here."""
