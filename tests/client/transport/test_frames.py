"""No frame is sent twice, and none is lost, whatever interrupts a sending or a receiving.

Messages that are joined are the same parts in the same order, in fewer envelopes.
"""

from __future__ import annotations

import random
import select
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storm_client.transport import frames
from storm_client.transport.frames import Messages, joined

from stormd.protocol import (
    RESTORE_FIELDS,
    Envelope,
    Ping,
    Release,
    Restore,
    RestoreParts,
    Store,
    StoreParts,
    decode,
    encode,
    pack,
    unpack,
)
from stormd.protocol.dealer import Dealer
from stormd.protocol.limits import MAX_FRAME_BYTES
from stormd.protocol.zmtp import OPENING, Reader, framed

FRAMES = 20_000


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Dealer, socket.socket]]:
    """A dealer, and the socket that it is connected to."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        dealer = Dealer(tmp_path / "control", 30)
        peer, _ = listener.accept()
    with peer:
        peer.settimeout(30)
        peer.sendall(OPENING)
        yield dealer, peer
    dealer.close()


@contextmanager
def interrupts() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield what repeats a function until an alarm raises in it, at any moment."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    chance = random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)

    def repeat(function: Callable[[], object]) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
            while True:
                function()
        except KeyboardInterrupt:
            pass

    try:
        yield repeat
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_all(peer: socket.socket, count: int) -> list[int]:
    """Return the request numbers of so many messages."""
    reader, numbers = Reader(MAX_FRAME_BYTES), list[int]()
    while len(numbers) < count and (data := peer.recv(1 << 20)):
        reader.data += data
        while (found := reader.read()) is not None:
            if isinstance(found, bytes):
                numbers += [envelope.request for envelope in decode(found)]
    return numbers


def test_what_is_interrupted_is_sent_once(
    ends: tuple[Dealer, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the peer does not read, and the kernel accepts a part of a frame."""
    monkeypatch.setattr(frames, "FRAME_MESSAGES", 1)
    dealer, peer = ends
    outbox = [Envelope(number, Release([number])) for number in range(FRAMES)]
    messages = Messages(dealer, outbox)
    with ThreadPoolExecutor() as pool, interrupts() as repeat:
        received = pool.submit(read_all, peer, FRAMES)
        while outbox or dealer.unsent:
            repeat(messages.send)
        assert received.result(60) == list(range(FRAMES))


def test_what_is_interrupted_is_received_once(
    ends: tuple[Dealer, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormd.protocol.dealer.READ_BYTES", 64)
    dealer, peer = ends
    messages = Messages(dealer, [])
    seen: list[int] = []

    def receive() -> None:
        messages.receive()
        while (envelope := messages.first()) is not None:
            if envelope.request != len(seen) - 1:  # it was noted before an interrupt
                assert envelope.request == len(seen)
                seen.append(envelope.request)
            messages.handled()

    frame = b"".join(framed(encode([Envelope(number, Ping())])) for number in range(FRAMES))
    with ThreadPoolExecutor() as pool, interrupts() as repeat:
        sent = pool.submit(peer.sendall, frame)
        while len(seen) < FRAMES:
            repeat(receive)
        sent.result(60)


def test_a_peer_that_does_not_read_is_told_of(ends: tuple[Dealer, socket.socket]) -> None:
    dealer, peer = ends
    outbox = [Envelope(number, Release([1] * 256)) for number in range(FRAMES)]
    messages = Messages(dealer, outbox)
    assert not messages.send()
    assert outbox
    with ThreadPoolExecutor() as pool:
        received = pool.submit(read_all, peer, FRAMES)
        while not messages.send():
            select.select([], [dealer], [], 30)
        assert received.result(60) == list(range(FRAMES))


def test_a_closed_dealer_and_a_closed_peer_are_no_error(
    ends: tuple[Dealer, socket.socket],
) -> None:
    """A signal handler may close the dealer between any two steps."""
    dealer, peer = ends
    peer.sendall(framed(encode([Envelope(7, Ping())])))
    peer.close()
    messages = Messages(dealer, [Envelope(1, Ping())])
    assert messages.send()
    messages.receive()
    assert messages.first() == Envelope(7, Ping())
    messages.handled()
    messages.receive()
    assert dealer.is_ended
    dealer.close()
    messages.receive()
    dealer.send(b"late")
    assert messages.first() is None


def restore(number: int) -> Envelope:
    message = Restore(ticket=number, entry=2, segment=3, offset=4, nbytes=5, sequence=6)
    return Envelope(number, message)


def store(number: int, dtype: str = "uint8") -> Envelope:
    message = Store(
        entry=number, segment=2, offset=3, nbytes=4, dtype=dtype, codec="raw", sequence=5
    )
    return Envelope(number, message)


def test_what_is_of_one_kind_and_beside_each_other_is_joined() -> None:
    batch = [store(1), store(2), store(3, "float16"), restore(1), restore(2), store(4)]
    stores = pack([1, 2, 3, 4, 5, 2, 2, 3, 4, 5])
    assert list(joined(batch)) == [
        Envelope(0, StoreParts(dtype="uint8", codec="raw", places=stores)),
        store(3, "float16"),
        Envelope(0, RestoreParts(pack([1, 2, 3, 4, 5, 6, 2, 2, 3, 4, 5, 6]))),
        store(4),
    ]


def flat(batch: list[Envelope]) -> list[tuple[object, ...]]:
    """Return what is said of each part."""
    said: list[tuple[object, ...]] = []
    for _, message in batch:
        match message:
            case RestoreParts():
                said += unpack(message.places, RESTORE_FIELDS)
            case StoreParts():
                said += [one.to_wire() for one in message.stores()]
            case Restore() | Store():
                said.append(message.to_wire())
            case _:
                said.append((message,))
    return said


SINGLE = st.one_of(
    st.builds(restore, st.integers(1, 50)),
    st.builds(store, st.integers(1, 50), st.sampled_from(["uint8", "float16"])),
    st.builds(lambda n: Envelope(0, Release([n])), st.integers(0, 3)),
)


@given(st.lists(SINGLE, min_size=1, max_size=20))
def test_nothing_is_lost_or_moved(batch: list[Envelope]) -> None:
    made = list(joined(batch))
    assert flat(decode(encode(made))) == flat(batch)
    assert len(made) <= len(batch)
