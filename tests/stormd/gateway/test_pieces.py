"""Pieces on their way to a daemon: descriptor and message find each other, and are answered."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon_thread import DaemonThread
from support.raw_client import RawClient
from support.waiting import wait_until

from stormd.lanes.cpu import CpuLane
from stormd.ledger.events import Mappable, SegmentMapped
from stormd.protocol import Mapped, MapPiece, Refused, ReserveRange
from stormd.protocol.limits import MAX_PIECES_WAITING

RANGE = 100


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that the lane was given; it maps all that it is offered."""
    found: list[str] = []

    def map_segment(lane: CpuLane, session: int, request: Mappable, descriptor: int = -1) -> None:
        if descriptor >= 0:
            found.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
            os.close(descriptor)
        lane._post(SegmentMapped(session=session, segment=request.segment))

    monkeypatch.setattr(CpuLane, "map_segment", map_segment)
    return found


@pytest.fixture
def client(names: list[str], client: RawClient) -> Iterator[RawClient]:
    """One with a range, whose descriptors are all closed in the end."""
    before = handed_files()
    assert client.ask(ReserveRange(segment=RANGE, nbytes=1 << 20)) == Mapped(RANGE)
    yield client
    client.line.close()
    wait_until(lambda: handed_files() == before)


def handed_files() -> int:
    """Return how many files of `hand_over` are open, here and in the daemon of this process."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.append(entry.readlink().name)
        except FileNotFoundError:  # closed meanwhile
            continue
    return sum(name.startswith("memfd:piece") for name in names)


def hand_over(client: RawClient, number: int) -> None:
    descriptor = os.memfd_create(f"piece {number}")
    socket.send_fds(client.line, [number.to_bytes(8, "little")], [descriptor])
    os.close(descriptor)


def piece(number: int) -> MapPiece:
    return MapPiece(segment=number, into=RANGE, offset=number << 12, nbytes=1 << 12)


def test_either_comes_first(client: RawClient, names: list[str]) -> None:
    client.send(piece(1), piece(2))
    hand_over(client, 2)
    client.wait_for(Mapped, segment=2)
    hand_over(client, 3)
    hand_over(client, 1)
    client.wait_for(Mapped, segment=1)
    assert client.ask(piece(3)) == Mapped(3)
    assert names == [f"memfd:piece {number} (deleted)" for number in (2, 1, 3)]


def test_the_descriptor_of_a_piece_that_is_refused_is_closed(
    client: RawClient, names: list[str]
) -> None:
    hand_over(client, 1)
    refused = client.ask(MapPiece(segment=1, into=7, offset=0, nbytes=1))
    assert isinstance(refused, Refused)
    wait_until(lambda: not handed_files())
    assert not names


def test_messages_that_wait_for_descriptors_are_limited(client: RawClient) -> None:
    client.send(*(piece(number) for number in range(MAX_PIECES_WAITING)))
    assert "send those first" in client.ask(piece(MAX_PIECES_WAITING)).detail


def test_descriptors_that_wait_for_messages_are_limited(
    client: RawClient, make_neighbour: Callable[[], Any]
) -> None:
    for number in range(MAX_PIECES_WAITING + 1):
        hand_over(client, number)
    assert client.is_cut_off()
    make_neighbour()


@pytest.fixture
def make_neighbour(daemon: DaemonThread, connect: Callable[..., RawClient]) -> Callable[[], Any]:
    """Check that somebody else is served."""
    return lambda: connect(daemon).open().stored(b"data")
