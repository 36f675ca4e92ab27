"""What can go wrong in the daemon, by whose fault.

A message names the value, the limit and the next step, and nothing was changed by the call that
raised.
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
    "remedy",
]

_REMEDIES: Final = {
    errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE=), or end a session",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "free memory, or raise the limit of address space (ulimit -v) or of the cgroup",
    errno.ENOSPC: "free room there",
}
"""For what is short, whatever it was wanted for."""


def remedy(error: OSError, otherwise: str) -> str:
    """Return what the kernel says and what to do: `otherwise` where it is not that there is none.

    As one sentence, so that no want of memory is told as one of descriptors.
    """
    return f"{error.strerror or error}: {_REMEDIES.get(error.errno or 0, otherwise)}"


class StormdError(Exception):
    """Base of all errors of the daemon."""


class ConfigError(StormdError):
    """The operator's: a setting that cannot be used."""


class NoDaemon(StormdError):
    """The environment's: no daemon answers where one was asked for."""


class UpgradeUnavailable(StormdError):
    """The operator's: a daemon cannot be replaced under its trainers, or not from here."""


class AddressInUse(StormdError):
    """The operator's: another daemon lives at the address."""


class DirectoryUnsafe(StormdError):
    """The environment's: the runtime directory belongs to, or is writable by, someone else."""


class PoolUnavailable(StormdError):
    """The environment's: the machine does not give the memory that the pool asks for."""


class SpillUnavailable(StormdError):
    """The environment's: the tier on disk cannot be opened."""


class StartStopped(StormdError):
    """The operator's wish: the daemon was told to end before it served."""


class LaneUnavailable(StormdError):
    """The environment's: a lane cannot be opened, or cannot take another session or segment."""


class ChildFailed(StormdError):
    """A process that the demo or a benchmark started did not do its work."""


class CommandUnusable(StormdError):
    """The user's: a command for `stormd run` that cannot be started."""

    def __init__(self, text: str, exit_status: int) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class MpsUnavailable(StormdError):
    """The environment's: CUDA's MPS cannot be had here."""
