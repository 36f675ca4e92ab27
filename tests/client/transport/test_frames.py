"""No frame is sent twice, and none is lost, whatever interrupts a sending or a receiving.

Messages that are joined are the same parts in the same order, in fewer envelopes.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from storm_client.transport.frames import Frames, joined

from stormd.protocol import (
    RESTORE_FIELDS,
    Envelope,
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

INTERRUPTS = 1000
FRAMES = 50_000


@pytest.fixture
def ends() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Two ends of a connection without limits."""
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for end in (one, other):
        end.setsockopt(zmq.SNDHWM, 0)
        end.setsockopt(zmq.RCVHWM, 0)
    one.bind("inproc://frames")
    other.connect("inproc://frames")
    yield one, other
    context.destroy(linger=0)


@contextmanager
def interrupts() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield what repeats a function until an alarm raises in it, at any moment."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    chance = random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)

    def repeat(function: Callable[[], object]) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 2e-4))
            while True:
                function()
        except KeyboardInterrupt:
            pass

    try:
        yield repeat
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_interrupted_is_sent_once(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    frames = Frames(ends[0])
    state: tuple[int, list[int]] = (0, [])

    def send() -> None:
        nonlocal state
        number, sent = state
        frames.send(b"%d" % number, sent)
        state = (number + 1, [])

    with interrupts() as repeat:
        for _ in range(INTERRUPTS):
            repeat(send)
    number, sent = state
    expected = number + bool(sent)
    received = [ends[1].recv() for _ in range(expected)]
    assert received == [b"%d" % number for number in range(expected)]
    assert not ends[1].poll(0)


def test_what_is_interrupted_is_received_once(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    for number in range(FRAMES):
        ends[1].send(b"%d" % number)
    frames = Frames(ends[0])
    state: tuple[int, list[int]] = (0, [])
    is_empty = False

    def receive() -> None:
        nonlocal state, is_empty
        number, received = state
        frame = frames.receive(received)
        if frame is None:
            is_empty = True
            return
        assert int(frame) == number
        state = (number + 1, [])

    with interrupts() as repeat:
        while not is_empty:
            repeat(receive)
    assert state[0] == FRAMES


def test_a_closed_socket_is_not_called(
    ends: tuple[zmq.Socket[bytes], zmq.Socket[bytes]],
) -> None:
    """A signal handler may close it between the last check and the call, which would crash."""
    frames = Frames(ends[0])
    ends[1].send(b"waiting")
    frames.close()
    with pytest.raises(zmq.Again):
        frames.send(b"late", [])
    assert frames.receive([]) is None
    assert not ends[1].poll(0)


def restore(number: int) -> Envelope:
    message = Restore(ticket=number, entry=2, segment=3, offset=4, nbytes=5, sequence=6)
    return Envelope(number, message)


def store(number: int, dtype: str = "uint8") -> Envelope:
    message = Store(
        entry=number,
        segment=2,
        offset=3,
        nbytes=4,
        dtype=dtype,
        codec="raw",
        sequence=5,
        ready=6,
    )
    return Envelope(number, message)


def test_what_is_of_one_kind_and_beside_each_other_is_joined() -> None:
    batch = [store(1), store(2), store(3, "float16"), restore(1), restore(2), store(4)]
    stores = pack([1, 2, 3, 4, 5, 6, 2, 2, 3, 4, 5, 6])
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
