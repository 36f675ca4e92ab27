"""Shared memory: seen by both sides, of a size that nobody can change, without a trace."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from stormd.memory.shared_memory import SharedMemory


def test_both_sides_see_the_same_bytes() -> None:
    memory = SharedMemory("test", 8192)
    descriptor = memory.take_descriptor()
    with mmap.mmap(descriptor, 8192) as other:
        other[100:104] = b"here"
        assert ctypes.string_at(memory.address + 100, 4) == b"here"
    os.close(descriptor)
    memory.close()


@pytest.mark.parametrize("nbytes", [0, 4096, 16384])
def test_its_size_is_sealed(nbytes: int) -> None:
    memory = SharedMemory("test", 8192)
    descriptor = memory.take_descriptor()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, nbytes)
    os.close(descriptor)
    memory.close()


def test_closing_twice_is_fine_and_leaves_no_descriptor() -> None:
    memory = SharedMemory("test", 4096)
    memory.close()
    memory.close()


def test_a_descriptor_is_taken_once() -> None:
    memory = SharedMemory("test", 4096)
    os.close(memory.take_descriptor())
    with pytest.raises(AssertionError, match="taken"):
        memory.take_descriptor()
    memory.close()
