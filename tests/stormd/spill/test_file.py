"""The tier's file: nameless, its room set aside, whole transfers or an error."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from support.spilling import skip_without_disk

from stormd.errors import SpillUnavailable
from stormd.memory.extents import PAGE
from stormd.spill import file as module
from stormd.spill.file import SpillFile, check_directory

MIB = 1 << 20


def _pages(text: bytes) -> memoryview:
    """Return memory that a disk can reach, filled with a text."""
    memory = memoryview(mmap.mmap(-1, len(text)))
    memory[:] = text
    return memory


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return an empty directory on a disk."""
    skip_without_disk(tmp_path)
    return tmp_path


def test_a_file_system_without_nameless_files_has_its_name_removed(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.open

    def no_tmpfile(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", no_tmpfile)
    file = SpillFile(disk, MIB)
    assert not list(disk.iterdir())
    file.write(0, _pages(bytes(PAGE)))
    file.close()


def test_a_file_system_without_direct_transfers_is_named(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(SpillUnavailable, match=r"without O_DIRECT.*choose a directory on a local"):
        SpillFile(disk, MIB)
    assert not list(disk.iterdir())


def test_a_directory_in_memory_is_refused() -> None:
    """Though Linux has O_DIRECT there since 6.6."""
    with pytest.raises(SpillUnavailable, match=r"/dev/shm is on .* in memory, tmpfs: choose a"):
        SpillFile(Path("/dev/shm"), MIB)


@pytest.mark.parametrize(("kind", "is_taken"), [("ramfs", False), ("ext4", True)])
def test_the_type_is_that_of_the_directorys_own_file_system(
    disk: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    kind: str, is_taken: bool,
) -> None:  # fmt: skip
    device = disk.stat().st_dev
    mounts = tmp_path_factory.mktemp("proc") / "mountinfo"
    mounts.write_bytes(
        b"23 27 0:0 / /a\\040\xff\x85 rw shared:7 master:2 - tmpfs none rw\n"
        + f"24 27 {os.major(device)}:{os.minor(device)} / /b rw - {kind} /dev/x rw\n".encode()
    )
    monkeypatch.setattr(module, "_MOUNTS", mounts)
    if is_taken:
        check_directory(disk)
    else:
        with pytest.raises(SpillUnavailable, match=f"in memory, {kind}"):
            check_directory(disk)
    assert not list(disk.iterdir())


def test_no_such_directory(disk: Path) -> None:
    with pytest.raises(SpillUnavailable, match=r"no/where cannot be used .No such file.*exists"):
        SpillFile(disk / "no" / "where", MIB)


def test_room_that_is_not_there_is_found_at_start(disk: Path) -> None:
    there = os.statvfs(disk)
    with pytest.raises(SpillUnavailable, match=r"has .* free \(.*set --spill-bytes lower"):
        SpillFile(disk, there.f_blocks * there.f_frsize * 4 // PAGE * PAGE)
    assert not list(disk.iterdir())


def test_short_transfers_are_gone_on_with(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpillFile(disk, MIB)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:PAGE], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:PAGE]], at))
    text = os.urandom(4 * PAGE)
    file.write(PAGE, _pages(text))
    into = _pages(bytes(4 * PAGE))
    file.read(PAGE, into)
    assert bytes(into) == text
    file.close()


def test_a_transfer_that_gets_nowhere_is_an_error(disk: Path) -> None:
    file = SpillFile(disk, MIB)
    with pytest.raises(OSError, match=r"ends before"):
        file.read(2 * MIB, _pages(bytes(PAGE)))
    file.close()
