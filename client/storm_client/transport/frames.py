"""Sends and receives messages such that after an interrupt it is certain whether that was done.

A frame sent twice makes the daemon write to memory that belongs to another tensor by then. A
received frame that is thrown away is an answer that never comes. So messages leave the outbox in
the same step in which their frame becomes the dealer's, and bytes leave the dealer in the same step
in which their messages come into the inbox. In such a step no signal handler can run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from stormd.protocol import (
    Envelope,
    Restore,
    RestoreParts,
    Store,
    StoreParts,
    decode,
    encode,
    pack,
)
from stormd.protocol.dealer import Dealer
from stormd.protocol.zmtp import framed

__all__ = ["Messages", "joined"]

FRAME_MESSAGES = 256
"""Messages sent in one frame: this many of the longest kind, a Release of 256 entries, fit."""


class Messages:
    """Sends and receives messages by one dealer; the connection's lock protects it."""

    def __init__(self, dealer: Dealer, outbox: list[Envelope]) -> None:
        """Send the messages in `outbox`, to which others append."""
        self._dealer = dealer
        self._outbox = outbox
        self._inbox: deque[Envelope] = deque()  # received messages that are not handled yet

    def send(self) -> bool:
        """Send the outbox; return False if the daemon has to read before the rest can be sent.

        An interrupt neither loses a message nor repeats one.
        """
        dealer, outbox = self._dealer, self._outbox
        while dealer.transmit():
            if not outbox:
                return True
            batch = outbox[:FRAME_MESSAGES]
            count = len(batch)
            frame = memoryview(framed(encode(batch if count == 1 else joined(batch))))
            # No call is between these two statements, so Python checks for no signal.
            dealer.unsent = frame
            del outbox[:count]
        return False

    def receive(self) -> None:
        """Receive what has arrived, unless messages wait to be handled.

        Raises:
            ProtocolError: the daemon has sent something that is not a frame.
        """
        if self._inbox:
            return
        frames, unread = self._dealer.received()
        inbox = deque([envelope for frame in frames for envelope in decode(frame)])
        # As above.
        self._inbox = inbox
        self._dealer.unread = unread

    def first(self) -> Envelope | None:
        """Return the next message to handle, the same until `handled` is called; None if none."""
        return self._inbox[0] if self._inbox else None

    def handled(self) -> None:
        """Note that the first message was handled."""
        self._inbox.popleft()


def joined(batch: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return messages of the same content and order, in as few envelopes as possible.

    A chunk's cost is mostly its message. Chunks are requested one by one when they are needed;
    adjacent stores or restores are joined only when a frame is made. So nothing is delayed, and the
    order is kept. A batch has at most MAX_BATCH chunks.
    """
    made: list[Envelope] = []
    for join, group in groupby(batch, _alike):
        same = list(group)
        made += same if join is None or len(same) == 1 else [_join(same)]
    return made


def _alike(envelope: Envelope) -> tuple[str, str] | None:
    """Return a key that is equal for messages that can be joined; None if one cannot."""
    message = envelope.message
    if isinstance(message, Restore):
        return "", ""
    return (message.dtype, message.codec) if isinstance(message, Store) else None


def _join(batch: Sequence[Envelope]) -> Envelope:
    first = batch[0].message
    if not isinstance(first, Store):
        return Envelope(0, RestoreParts(pack([n for _, one in batch for n in one.to_wire()])))
    places: list[int] = []
    for _, message in batch:
        entry, segment, offset, nbytes, _, _, sequence = message.to_wire()
        places += entry, segment, offset, nbytes, sequence
    return Envelope(0, StoreParts(dtype=first.dtype, codec=first.codec, places=pack(places)))
