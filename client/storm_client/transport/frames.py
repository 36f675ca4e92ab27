"""Sends and receives frames so that whatever interrupts it leaves no doubt whether that was done.

pyzmq runs Python's signal handlers in its calls, after libzmq has done the work: an exception that
one raises, as Ctrl-C does, looks as if nothing had been sent or received. A frame sent once more
has the daemon write to memory that is somebody else's by then; a frame received and thrown away is
an answer that never comes. So libzmq is called here without pyzmq in between, and what it returns
is noted in the same step, in which no handler can run. What a frame was made of, or came to, is let
go or kept in that step, too.
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

# The one that pyzmq has loaded. No call waits here: to give the interpreter up would cost more.
_LIBZMQ = ctypes.PyDLL(_zmq.__file__, use_errno=True)
_SEND, _RECEIVE = _LIBZMQ.zmq_send, _LIBZMQ.zmq_recv
for _function in (_SEND, _RECEIVE):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _function.restype = ctypes.c_int

DONTWAIT = int(zmq.DONTWAIT)

FRAME_MESSAGES = 256
"""Messages sent in one frame: of the longest kind, a Release of 256 entries, they fit."""

_succeeded = (-1).__lt__
"""Of what a call returns; written in C, as it has to be where it is used."""

_Function: TypeAlias = Callable[[int, object, int, int], int]


class Frames:
    """The frames of one socket of pyzmq's; its owner makes sure that nobody is here when it closes.

    What was done is noted in a list of the caller's, which is empty until then: it lets the note
    go in the same step as what the frame was made of, or came to.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Use `socket`, which stays its owner's."""
        self._socket = socket
        self._handle = int(socket.underlying)
        self._buffer = (ctypes.c_char * MAX_FRAME_BYTES)()

    def send(self, frame: bytes, sent: list[int]) -> None:
        """Send a frame, unless `sent` says that it was.

        Raises:
            zmq.ZMQError: it was not sent; zmq.Again where the queue is full.
        """
        if not sent and self._socket.closed:
            raise zmq.ZMQError(errno.ENOTSOCK)
        if not self._do(_SEND, frame, len(frame), sent):
            raise zmq.Again(errno.EAGAIN)

    def receive(self, received: list[int]) -> bytes | None:
        """Return the next frame, or once more the last, if `received` says that it came.

        None where there is none, or the socket is closed.

        Raises:
            zmq.ZMQError: it cannot be had.
        """
        if not received and self._socket.closed:
            return None
        if not self._do(_RECEIVE, self._buffer, MAX_FRAME_BYTES, received):
            return None
        # A longer one than may be is cut, and is no frame then.
        frame: bytes = self._buffer[: min(received[0], MAX_FRAME_BYTES)]  # type: ignore[assignment]
        return frame

    def _do(self, function: _Function, data: object, size: int, done: list[int]) -> bool:
        """Call a function unless it is done; False where it cannot be now."""
        while not done:
            # Through a map, for nothing to come between the call and the note of it.
            result = map(function, (self._handle,), (data,), (size,), (DONTWAIT,))
            done.extend(filter(_succeeded, result))
            if not done:
                error = ctypes.get_errno()
                if error == errno.EAGAIN:
                    return False
                if error != errno.EINTR:
                    raise zmq.ZMQError(error)
        return True


class Messages:
    """What is said and heard on one socket; the connection's lock protects it."""

    def __init__(self, socket: zmq.Socket[bytes], outbox: list[Envelope]) -> None:
        """Send what is in `outbox`, which others append to."""
        self._frames = Frames(socket)
        self._outbox = outbox
        self._leaving = 0  # how many of the outbox the frame has that is sent next, or was last
        self._sent: list[int] = []  # says so where they were, and are in the outbox still
        self._received: list[int] = []  # the same of a frame that is not in the inbox yet
        self._inbox: deque[Envelope] = deque()  # what of the last frame has not been handled

    def send(self) -> None:
        """Send what is in the outbox. What interrupts it neither loses a message nor repeats one.

        Raises:
            zmq.ZMQError: not all was sent; zmq.Again where the queue is full.
        """
        while self._outbox:
            if not self._sent:
                batch = self._outbox[:FRAME_MESSAGES]
                self._leaving = len(batch)
                frame = encode(batch if len(batch) == 1 else joined(batch))
                self._frames.send(frame, self._sent)
            # Nothing is called between these two, and so no signal looked for.
            del self._outbox[: self._leaving]
            self._sent = []

    def first(self, *, receives: bool = True) -> Envelope | None:
        """Return what was received and is to be handled next; None where there is nothing.

        Once more the same where `handled` was not called. What has not been received yet is, unless
        that is not wanted.

        Raises:
            ProtocolError: the daemon has sent what is no frame.
        """
        if not self._inbox:
            frame = self._frames.receive(self._received) if receives else None
            if frame is None:
                return None
            self._inbox, self._received = deque(decode(frame)), []
        return self._inbox[0]

    def handled(self) -> None:
        """Go on to the next."""
        self._inbox.popleft()


def joined(batch: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return messages that say the same in the same order, in as few envelopes as may be.

    What a chunk costs is mostly its message. Chunks are asked for one by one where they are needed,
    and stores or restores that are neighbours are joined where a frame is made: nobody waits for
    others to come, and the order stays. A batch has at most MAX_BATCH of them.
    """
    made: list[Envelope] = []
    for join, group in groupby(batch, _alike):
        same = list(group)
        made += same if join is None or len(same) == 1 else [_join(same)]
    return made


def _alike(envelope: Envelope) -> tuple[str, str] | None:
    """Return what neighbours that can be joined have in common; None for what cannot be."""
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
