"""Shared memory: seen by both sides, of a size that nobody can change, without a trace."""

from __future__ import annotations

import ctypes
import os

import pytest

from stormd.memory.shared_memory import SharedMemory


def test_its_size_is_sealed() -> None:
    memory = SharedMemory("test", 8192)
    descriptor = memory.take_descriptor()
    for nbytes in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    os.close(descriptor)
    memory.close()


def test_memory_is_had_again_by_its_descriptor_and_nothing_else_is_taken_for_it() -> None:
    memory = SharedMemory("test", 8192)
    ctypes.memmove(memory.address, b"here", 4)
    descriptor = memory.take_descriptor()
    again = SharedMemory("test", 8192, os.dup(descriptor))
    assert ctypes.string_at(again.address, 4) == b"here"
    again.close()
    memory.close()
    with pytest.raises(OSError, match="no sealed memory of 4096 bytes"):
        SharedMemory("test", 4096, os.dup(descriptor))
    os.close(descriptor)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(OSError, match="no sealed memory"):
        SharedMemory("test", 4096, unsealed)
    with pytest.raises(OSError, match="no sealed memory"):
        SharedMemory("test", 4096, os.open("/dev/zero", os.O_RDWR))
