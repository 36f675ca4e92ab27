"""A failed allocation is tried again while Python makes room, else it is PyTorch's error."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from storm_client.native import build
from storm_client.native import loader as native

SOURCE = Path(__file__).parents[2] / "support" / "failing_allocator.cpp"
DEVICE = "privateuseone"


class Allocator:
    """Memory of a device type that nobody has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.allocate.restype = ctypes.c_char_p
        library.allocate.argtypes = library.set_room.argtypes = [ctypes.c_size_t]
        library.install()

    def set_room(self, nbytes: int) -> None:
        self._library.set_room(nbytes)

    def allocate(self, nbytes: int) -> str | None:
        """Return the error's text if the allocation fails."""
        said = self._library.allocate(nbytes)
        return None if said is None else said.decode()


@pytest.fixture(scope="module")
def module() -> native.Native:
    return native._load(build.build())


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory, module: native.Native) -> Allocator:
    made = tmp_path_factory.mktemp("allocator") / "failing.so"
    torch = build._torch()
    flags = [*build._flags(torch), str(SOURCE), "-o", str(made), *build._libraries(torch)]
    subprocess.run(["g++", *flags], check=True, timeout=300)
    return Allocator(ctypes.CDLL(str(made)))


Relief = Callable[[int, int], object]


def watch(module: native.Native, relief: Relief) -> None:
    assert module.watch_allocations(DEVICE, relief)


def test_an_allocation_is_tried_again_when_room_was_made(
    module: native.Native, allocator: Allocator
) -> None:
    asked: list[tuple[int, int]] = []

    def relieve(nbytes: int, attempt: int) -> bool:
        asked.append((nbytes, attempt))
        allocator.set_room(attempt * 50)
        return True

    watch(module, relieve)
    allocator.set_room(10)
    assert allocator.allocate(10) is None
    assert asked == []
    assert allocator.allocate(100) is None
    assert asked == [(100, 0), (100, 1), (100, 2)]


@pytest.mark.parametrize("answer", [False, None, "", 0, "stormd: nothing is left"])
def test_an_error_passes_where_no_room_was_made(
    answer: object, module: native.Native, allocator: Allocator
) -> None:
    """With what is said of it as a line more."""
    watch(module, lambda *_: answer)
    allocator.set_room(10)
    said = str(allocator.allocate(100))
    assert said.startswith("out of memory: 100 bytes")
    assert str(answer or "") in said


def test_it_ends_where_room_is_made_in_vain(module: native.Native, allocator: Allocator) -> None:
    attempts: list[int] = []

    def relieve(_: int, attempt: int) -> bool:
        attempts.append(attempt)
        return True

    watch(module, relieve)
    allocator.set_room(10)
    assert allocator.allocate(100) is not None
    assert attempts == list(range(8))


def test_what_makes_room_may_fail_to_allocate(module: native.Native, allocator: Allocator) -> None:
    inner: list[str | None] = []

    def relieve(_: int, attempt: int) -> bool:
        inner.append(allocator.allocate(70))
        allocator.set_room(100)
        return attempt == 0

    watch(module, relieve)
    allocator.set_room(10)
    assert allocator.allocate(100) is None
    assert len(inner) == 1
    assert inner[0] is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_in_it_is_not_the_allocation_s(
    module: native.Native, allocator: Allocator
) -> None:
    def relieve(*_: int) -> bool:
        raise ValueError("in the midst of making room")

    watch(module, relieve)
    allocator.set_room(10)
    assert str(allocator.allocate(100)).startswith("out of memory: 100 bytes")


def test_an_interrupt_is_not_lost(module: native.Native, allocator: Allocator) -> None:
    def relieve(*_: int) -> bool:
        signal.raise_signal(signal.SIGINT)
        return True

    watch(module, relieve)
    allocator.set_room(10)
    with pytest.raises(KeyboardInterrupt):
        _allocate_and_go_on(allocator)


def _allocate_and_go_on(allocator: Allocator) -> None:
    allocator.allocate(100)
    for _ in range(1000):  # where Python looks for signals
        pass


def test_threads_make_room_one_by_one_or_together(
    module: native.Native, allocator: Allocator
) -> None:
    def relieve(_: int, attempt: int) -> bool:
        allocator.set_room(100)
        return attempt == 0

    watch(module, relieve)
    failed: list[str] = []

    def run() -> None:
        for _ in range(200):
            allocator.set_room(10)
            said = allocator.allocate(100)
            if said is not None and not said.startswith("out of memory"):
                failed.append(said)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failed


def test_what_cannot_be_watched_is_said(module: native.Native) -> None:
    assert not module.watch_allocations("xla", lambda *_: True)
