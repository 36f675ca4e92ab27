"""Goes on with a session whose daemon has ended, with the daemon that follows it.

What the session has stored outlives its daemon where Welcome said so: in memory that somebody else
keeps, with the sockets at the address, so that a connection waits until a daemon takes it. Where
nobody keeps them nobody listens, which is known at once. Here is the way to a channel on which the
session can go on; nothing of the session has changed until then, and an attempt that fails leaves
nothing.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NamedTuple, TypeAlias

import zmq

from storm_client.errors import DaemonUnavailable
from storm_client.lanes import STAGING
from storm_client.lanes.offers import Mappable
from storm_client.transport.handshake import FIRST_NUMBER, Channel, resumed_channel
from storm_client.transport.lifeline import Gone, NoAnswer
from stormd.protocol import (
    Entries,
    Envelope,
    ListEntries,
    Mapped,
    MapPiece,
    Message,
    ProtocolError,
    Refused,
    Welcome,
    decode,
    encode,
)

__all__ = ["Resumed", "resumed"]

ATTEMPT_SECONDS: Final = 5.0
"""For each answer: one that a daemon has taken before it was killed may never come."""

PAUSE_SECONDS: Final = 0.02
"""Between two attempts, each of which failed at once."""

LOOK_MILLISECONDS: Final = 100
"""Between two looks whether there is still somebody who wants the session."""

Descriptor: TypeAlias = Callable[[int], int | None]
"""Returns the descriptor of a piece by its number, for the caller to close; None for none."""

_ENDED: Final = "the daemon that was to go on with the session ended, or takes too long"


class Resumed(NamedTuple):
    """A channel on which a session goes on, with what the daemon has of it."""

    channel: Channel
    entries: frozenset[int]
    """That the daemon holds, or has promised room for."""
    mapped: frozenset[int]
    """The segments of those that were offered that it has mapped."""


def resumed(
    address: str,
    welcome: Welcome,
    shared: Sequence[int],
    *,
    offers: Callable[[], Sequence[Mappable]],
    descriptor: Descriptor,
    is_over: Callable[[], bool],
) -> Resumed | None:
    """Return the channel on which the session of `welcome` goes on, once there is a daemon.

    One is waited for as long as Welcome said, and where one comes and ends once more, for as long
    again. `offers` returns what is to be mapped again, and `descriptor` that of a piece. None where
    `is_over` says that nobody wants the session any more, which is asked from time to time.

    Raises:
        DaemonUnavailable: nobody listens there any more or has answered in time; or who does has
            no such session.
        ProtocolMismatch: the daemon speaks another version.
    """
    deadline = time.monotonic() + welcome.resume_seconds
    while not is_over():
        left = deadline - time.monotonic()
        try:
            channel = resumed_channel(address, welcome, shared, max(min(left, ATTEMPT_SECONDS), 0))
            return _agreed(channel, offers(), descriptor, is_over)
        except Gone:
            deadline = time.monotonic() + welcome.resume_seconds
        except NoAnswer:
            if time.monotonic() >= deadline:
                raise
        time.sleep(PAUSE_SECONDS)
    return None


def _agreed(
    channel: Channel,
    offers: Sequence[Mappable],
    descriptor: Descriptor,
    is_over: Callable[[], bool],
) -> Resumed:
    """Have segments mapped, and learn what entries there are; the channel is closed on an error."""
    try:
        return _asked(channel, offers, descriptor, _Asking(channel, is_over))
    except BaseException:
        channel.close()
        raise


def _asked(
    channel: Channel, offers: Sequence[Mappable], descriptor: Descriptor, ask: _Asking
) -> Resumed:
    numbers = count(FIRST_NUMBER)
    mapped = set()
    for offer in offers:
        if isinstance(offer, MapPiece) and not _handed_over(channel, offer.segment, descriptor):
            continue
        answer = ask(next(numbers), offer)
        if isinstance(answer, Mapped):
            mapped.add(offer.segment)
        elif offer.segment == STAGING:
            raise DaemonUnavailable(f"the daemon maps no staging area: {_said(answer)}")
    entries: list[int] = []
    is_all = False
    while not is_all:
        page = ask(next(numbers), ListEntries(entries[-1] if entries else 0))
        if not isinstance(page, Entries):
            raise DaemonUnavailable(f"the daemon lists no entries: {_said(page)}")
        entries += page.numbers
        is_all = page.is_all
    return Resumed(channel, frozenset(entries), frozenset(mapped))


def _handed_over(channel: Channel, number: int, descriptor: Descriptor) -> bool:
    """Send the descriptor of a piece; False where it is gone, or the daemon."""
    found = descriptor(number)
    if found is None:
        return False
    try:
        return channel.lifeline.hand_over(number, found)
    finally:
        os.close(found)


def _said(answer: Message) -> str:
    return answer.detail if isinstance(answer, Refused) else f"it said {type(answer).__name__}"


class _Asking:
    """Asks on a channel that nobody else uses yet, one question after the other."""

    def __init__(self, channel: Channel, is_over: Callable[[], bool]) -> None:
        self._channel = channel
        self._is_over = is_over
        self._poller = zmq.Poller()
        self._poller.register(channel.socket, zmq.POLLIN)
        self._poller.register(channel.lifeline.fileno(), select.POLLIN)

    def __call__(self, number: int, message: Message) -> Message:
        """Return the answer.

        Raises:
            NoAnswer: the daemon has ended, or takes too long.
        """
        socket, deadline = self._channel.socket, time.monotonic() + ATTEMPT_SECONDS
        try:
            socket.send(encode([Envelope(number, message)]))
        except zmq.Again as error:
            raise Gone(_ENDED) from error
        while not self._is_over() and time.monotonic() < deadline:
            ready = dict(self._poller.poll(LOOK_MILLISECONDS))
            if socket in ready:
                for request, answer in self._decoded(socket.recv()):
                    if request == number:
                        return answer
            elif ready:
                raise Gone(_ENDED)
        raise NoAnswer(_ENDED)

    def _decoded(self, frame: bytes) -> list[Envelope]:
        try:
            return list(decode(frame))
        except ProtocolError as error:
            raise DaemonUnavailable(
                f"the daemon's answer is of another version: {error}"
            ) from error
