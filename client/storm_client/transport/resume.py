"""Resumes a session whose daemon has ended, with the next daemon.

If Welcome said so, stored data outlives its daemon. Another process keeps it in memory, and keeps
the sockets at the address open, so that a connection waits until a daemon accepts it. Without that
process nobody listens, which is known at once. This module opens a channel on which the session can
continue. Until then nothing of the session changes, and a failed attempt leaves nothing behind.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, NamedTuple, TypeAlias

from storm_client.errors import DaemonUnavailable
from storm_client.lanes import STAGING
from storm_client.lanes.offers import Mappable
from storm_client.transport.handshake import FIRST_NUMBER, Channel, resumed_channel
from storm_client.transport.lifeline import LOOK_SECONDS, Gone, NoAnswer
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
from stormd.protocol.dealer import Dealer

__all__ = ["Resumed", "resumed"]

ATTEMPT_SECONDS: Final = 5.0
"""For the daemon to grant the session: it may have been killed after it took the request."""

PAUSE_SECONDS: Final = 0.02
"""Between two attempts, if the first failed at once."""

PieceDescriptor: TypeAlias = Callable[[int], int | None]
"""Returns the descriptor of a piece by its number, or None; the caller closes the descriptor."""

_ENDED: Final = "the daemon that was to go on with the session ended, or takes too long"


class Resumed(NamedTuple):
    """A channel on which a session continues, with the daemon's state of the session."""

    channel: Channel
    entries: frozenset[int]
    """The entries that the daemon holds, or has promised room for."""
    mapped: frozenset[int]
    """The offered segments that the daemon has mapped."""


def resumed(
    address: str,
    welcome: Welcome,
    shared: Sequence[int],
    *,
    offers: Callable[[], Sequence[Mappable]],
    piece_descriptor: PieceDescriptor,
    is_over: Callable[[], bool],
) -> Resumed | None:
    """Return the channel on which the session of `welcome` continues, once a daemon accepts it.

    A daemon is waited for as long as Welcome said; if one comes and ends again, for as long again.
    Once it has the session, each of its answers is waited for as long.
    `offers` returns the segments to be mapped again. `piece_descriptor` returns the descriptor of a
    piece. Return None if `is_over`, which is called from time to time, says that nobody wants the
    session any more.

    Raises:
        DaemonUnavailable: nobody listens there any more or has answered in time, or the daemon does
            not know the session.
        ProtocolMismatch: the daemon speaks another version.
    """
    deadline = time.monotonic() + welcome.resume_seconds
    while not is_over():
        left = deadline - time.monotonic()
        try:
            seconds = max(min(left, ATTEMPT_SECONDS), 0)
            channel = resumed_channel(address, welcome, shared, seconds, is_over)
            ask = _Asking(channel, welcome.resume_seconds, is_over)
            return _agreed(channel, offers(), piece_descriptor, ask)
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
    piece_descriptor: PieceDescriptor,
    ask: _Asking,
) -> Resumed:
    """Have the offers mapped, and get the list of entries; close the channel on an error."""
    try:
        return _asked(channel, offers, piece_descriptor, ask)
    except BaseException:
        channel.close()
        raise


def _asked(
    channel: Channel, offers: Sequence[Mappable], piece_descriptor: PieceDescriptor, ask: _Asking
) -> Resumed:
    numbers = count(FIRST_NUMBER)
    mapped = set()
    for offer in offers:
        if isinstance(offer, MapPiece) and not _send_piece(
            channel, offer.segment, piece_descriptor
        ):
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


def _send_piece(channel: Channel, number: int, piece_descriptor: PieceDescriptor) -> bool:
    """Send the descriptor of a piece; return False if the piece or the daemon is gone."""
    found = piece_descriptor(number)
    if found is None:
        return False
    try:
        return channel.lifeline.send_descriptor(number, found)
    finally:
        os.close(found)


def _said(answer: Message) -> str:
    return answer.detail if isinstance(answer, Refused) else f"it said {type(answer).__name__}"


class _Asking:
    """Asks questions one after the other, on a channel that nobody else uses yet."""

    def __init__(self, channel: Channel, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait `seconds` for each answer: without one, the session is lost."""
        self._channel = channel
        self._seconds = seconds
        self._is_over = is_over
        self._poller = select.poll()
        self._poller.register(channel.dealer, select.POLLIN)
        self._poller.register(channel.lifeline, select.POLLIN)

    def __call__(self, number: int, message: Message) -> Message:
        """Return the answer.

        Raises:
            NoAnswer: the daemon has ended, or takes too long.
        """
        dealer, deadline = self._channel.dealer, time.monotonic() + self._seconds
        dealer.send(encode([Envelope(number, message)]))
        while not self._is_over() and time.monotonic() < deadline:
            ready = dict(self._poller.poll(LOOK_SECONDS * 1000))
            if dealer.fileno() in ready and not dealer.is_ended:
                for request, answer in self._received(dealer):
                    if request == number:
                        return answer
            elif ready:
                raise Gone(_ENDED)
        raise NoAnswer(_ENDED)

    def _received(self, dealer: Dealer) -> list[Envelope]:
        try:
            frames, dealer.unread = dealer.received()
            return [envelope for frame in frames for envelope in decode(frame)]
        except ProtocolError as error:
            raise DaemonUnavailable(
                f"the daemon's answer is of another version: {error}"
            ) from error
