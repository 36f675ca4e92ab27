"""Sends and receives frames such that after an interrupt it is certain whether that was done.

pyzmq runs Python's signal handlers in its calls, after libzmq has done the work. If a handler
raises, as Ctrl-C's does, it looks as if nothing had been sent or received. A frame sent twice makes
the daemon write to memory that belongs to another tensor by then. A received frame that is thrown
away is an answer that never comes. So this module calls libzmq without pyzmq, and notes the result
in the same step, in which no handler can run. In such a step it also drops the messages of a sent
frame, or keeps those of a received one.
"""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeAlias

import zmq
from zmq.backend.cython import _zmq

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
from stormd.protocol.limits import MAX_FRAME_BYTES

__all__ = ["Frames", "Messages", "joined"]

# The library that pyzmq has loaded. No call waits, so releasing the GIL would only cost time.
_LIBZMQ = ctypes.PyDLL(_zmq.__file__, use_errno=True)
_SEND, _RECEIVE = _LIBZMQ.zmq_send, _LIBZMQ.zmq_recv
for _function in (_SEND, _RECEIVE):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _function.restype = ctypes.c_int

DONTWAIT = int(zmq.DONTWAIT)

FRAME_MESSAGES = 256
"""Messages sent in one frame: this many of the longest kind, a Release of 256 entries, fit."""

_succeeded = (-1).__lt__
"""Checks a call's return value; its use requires a function written in C."""

_Function: TypeAlias = Callable[[int, object, int, int], int]


class Frames:
    """The frames of one pyzmq socket; its owner calls `close` before it closes the socket.

    A signal handler may do that at any moment, and libzmq uses what it is given without a check.

    A finished call is noted in a list of the caller's, which is empty until then. The caller drops
    the note in the same step in which it drops the sent messages or keeps the received ones.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Use `socket`, which its owner closes."""
        self._handles = [int(socket.underlying)]  # empty once the socket is closed
        self._buffer = (ctypes.c_char * MAX_FRAME_BYTES)()

    def send(self, frame: bytes, sent: list[int]) -> None:
        """Send a frame, unless `sent` notes that it was sent.

        Raises:
            zmq.ZMQError: it was not sent; zmq.Again means that the queue is full, or the
                socket closed.
        """
        if not self._do(_SEND, frame, len(frame), sent):
            raise zmq.Again(errno.EAGAIN)

    def receive(self, received: list[int]) -> bytes | None:
        """Return the next frame, or the last one again if `received` notes that it came.

        Return None if there is no frame, or the socket is closed.

        Raises:
            zmq.ZMQError: no frame can be received.
        """
        if not self._do(_RECEIVE, self._buffer, MAX_FRAME_BYTES, received):
            return None
        # A frame beyond the size limit is cut here, and cannot be decoded then.
        frame: bytes = self._buffer[: min(received[0], MAX_FRAME_BYTES)]  # type: ignore[assignment]
        return frame

    def close(self) -> None:
        """Make no more calls."""
        self._handles.clear()

    def _do(self, function: _Function, data: object, size: int, done: list[int]) -> bool:
        """Call a function unless `done` notes its result.

        Return False if the call would block, or the socket is closed.
        """
        while not done:
            # By a map, so that nothing comes between the look at the handle, the call and the note
            # of its result.
            result = map(function, self._handles, (data,), (size,), (DONTWAIT,))
            done.extend(filter(_succeeded, result))
            if not done:
                error = ctypes.get_errno()
                if error == errno.EAGAIN or not self._handles:
                    return False
                if error != errno.EINTR:
                    raise zmq.ZMQError(error)
        return True


class Messages:
    """Sends and receives messages on one socket; the connection's lock protects it."""

    def __init__(self, socket: zmq.Socket[bytes], outbox: list[Envelope]) -> None:
        """Send the messages in `outbox`, to which others append."""
        self._frames = Frames(socket)
        self._outbox = outbox
        self._batch_count = 0  # how many messages of the outbox the next or latest frame has
        self._sent: list[int] = []  # notes that they were sent, and are still in the outbox
        self._received: list[int] = []  # notes a received frame that is not in the inbox yet
        self._inbox: deque[Envelope] = deque()  # messages of the last frame not handled yet

    def send(self) -> None:
        """Send the outbox. An interrupt neither loses a message nor repeats one.

        Raises:
            zmq.ZMQError: not all messages were sent; zmq.Again means that the queue is full.
        """
        while self._outbox:
            if not self._sent:
                batch = self._outbox[:FRAME_MESSAGES]
                self._batch_count = len(batch)
                frame = encode(batch if len(batch) == 1 else joined(batch))
                self._frames.send(frame, self._sent)
            # No call is between these two statements, so Python checks for no signal.
            del self._outbox[: self._batch_count]
            self._sent = []

    def first(self, *, receives: bool = True) -> Envelope | None:
        """Return the next message to handle; None if there is none.

        Until `handled` is called, this returns the same message. With `receives`, a further frame
        is received if necessary.

        Raises:
            ProtocolError: the daemon has sent something that is not a frame.
        """
        if not self._inbox:
            frame = self._frames.receive(self._received) if receives else None
            if frame is None:
                return None
            self._inbox, self._received = deque(decode(frame)), []
        return self._inbox[0]

    def handled(self) -> None:
        """Note that the first message was handled."""
        self._inbox.popleft()

    def close(self) -> None:
        """Send and receive nothing more: the socket is about to be closed."""
        self._frames.close()


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
        entry, segment, offset, nbytes, _, _, sequence, ready = message.to_wire()
        places += entry, segment, offset, nbytes, sequence, ready
    return Envelope(0, StoreParts(dtype=first.dtype, codec=first.codec, places=pack(places)))
