"""The file of the tier: nameless, allocated in full at start, and read and written with O_DIRECT.

Nobody else can open the file, and nothing of it remains when the daemon has ended, however it
ended. All of the file's disk space is allocated at start, so a disk that fills up later does not
affect it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
from pathlib import Path
from typing import Final

from stormd.errors import SpillUnavailable
from stormd.sizes import format_size

__all__ = ["SpillFile", "check_directory"]

log = logging.getLogger(__name__)

_FLAGS: Final = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
_MODE: Final = 0o600
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MOUNTS: Final = Path("/proc/self/mountinfo")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def check_directory(directory: Path) -> None:
    """Check that a file of the tier can be made in the directory, whatever its size.

    Raises:
        SpillUnavailable: as SpillFile. Nothing remains in the directory.
    """
    os.close(_open(directory))


class SpillFile:
    """A file of `nbytes` in `directory`, for this process alone. Offsets and views are whole pages.

    Several threads write and read it at the same time.

    Raises:
        SpillUnavailable: the directory does not exist, cannot be written to or lacks the space, or
            its file system lacks what the tier needs. Nothing remains in the directory.
    """

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._descriptor = _open(directory)
        try:
            _set_aside(self._descriptor, directory, nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`.

        Raises:
            OSError: the write failed; part of the data may be in the file.
        """
        while data.nbytes:
            done = os.pwrite(self._descriptor, data, offset)
            if not done:
                raise OSError(errno.EIO, "nothing was written")
            offset, data = offset + done, data[done:]

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` on.

        Raises:
            OSError: the read failed; `into` may be filled in part.
        """
        while into.nbytes:
            done = os.preadv(self._descriptor, [into], offset)
            if not done:
                raise OSError(errno.EIO, "the file ends before what was written")
            offset, into = offset + done, into[done:]

    def close(self) -> None:
        """Close the file and free its disk space. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _open(directory: Path) -> int:
    """Open a file without a name; if the file system has none, make a file and unlink its name."""
    _refuse_memory(directory)
    try:
        return os.open(directory, os.O_TMPFILE | os.O_EXCL | _FLAGS, _MODE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise _unusable(directory, error) from error
    path = directory / f".stormd-spill-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | _FLAGS, _MODE)
    except OSError as error:
        with contextlib.suppress(OSError):  # some file systems make it before they refuse
            path.unlink()
        raise _unusable(directory, error) from error
    try:
        path.unlink()
    except OSError as error:
        os.close(descriptor)
        raise _unusable(directory, error) from error
    log.info("the file of the tier had a name for a moment: %s has no O_TMPFILE", directory)
    return descriptor


def _refuse_memory(directory: Path) -> None:
    """Raise if the directory is in memory: since Linux 6.6 tmpfs takes O_DIRECT as a disk does."""
    try:
        kind = _file_system(directory.stat().st_dev)
    except OSError as error:
        raise _unusable(directory, error) from error
    if kind in _IN_MEMORY:
        raise SpillUnavailable(
            f"spill_path {directory} is on a file system in memory, {kind}: choose a directory on "
            "a local disk, or set a larger --pool-bytes instead"
        )


def _file_system(device: int) -> str:
    """Return the type of the file system with this device number.

    Empty if it is unknown, as for a subvolume of btrfs, which has a number of its own.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_bytes().decode(errors="replace").split("\n"):
        mount, _, source = line.partition(" - ")
        if mount.split(" ")[2:3] == [number]:
            return source.partition(" ")[0]
    return ""


def _unusable(directory: Path, error: OSError) -> SpillUnavailable:
    if error.errno == errno.EINVAL:
        return SpillUnavailable(
            f"spill_path {directory} is on a file system without O_DIRECT: choose a directory on a "
            "local disk"
        )
    return SpillUnavailable(
        f"spill_path {directory} cannot be used ({error.strerror}): name a directory that exists "
        "and that the daemon's user may write to"
    )


def _set_aside(descriptor: int, directory: Path, nbytes: int) -> None:
    """Have the file system allocate all of the file's disk space."""
    if _libc.fallocate(descriptor, 0, 0, nbytes) == 0:
        return
    number = ctypes.get_errno()
    size = format_size(nbytes)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        there = os.statvfs(directory)
        free = format_size(there.f_bavail * there.f_frsize)
        raise SpillUnavailable(
            f"spill_bytes is {size}, and {directory} has {free} free ({os.strerror(number)}): set "
            "--spill-bytes lower, free room there, or raise its quota or `ulimit -f`"
        )
    raise SpillUnavailable(
        f"{directory} cannot set {size} aside for spill_bytes ({os.strerror(number)}): choose a "
        "directory on a local disk, as of ext4, XFS or btrfs"
    )
