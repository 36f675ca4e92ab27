"""Sends and receives frames so that whatever interrupts it leaves no doubt whether that was done.

pyzmq runs Python's signal handlers in its calls, after libzmq has done the work: an exception that
one raises, as Ctrl-C does, looks as if nothing had been sent or received. A frame sent once more
has the daemon write to memory that is somebody else's by then; a frame received and thrown away is
an answer that never comes. So libzmq is called here without pyzmq in between, and what it returns
is noted in the same step, in which no handler can run.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeAlias

import zmq
from zmq.backend.cython import _zmq

from stormd.protocol import Envelope, Restore, RestoreParts, Store, StoreParts, pack
from stormd.protocol.limits import MAX_FRAME_BYTES

__all__ = ["Frames", "joined"]

_LIBZMQ = ctypes.CDLL(_zmq.__file__, use_errno=True)  # the one that pyzmq has loaded
_SEND, _RECEIVE = _LIBZMQ.zmq_send, _LIBZMQ.zmq_recv
for _function in (_SEND, _RECEIVE):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _function.restype = ctypes.c_int

DONTWAIT = int(zmq.DONTWAIT)

READABLE = int(zmq.POLLIN)
"""As a plain number: the enumeration's own operators take several microseconds."""

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

    def has_arrived(self) -> bool:
        """Tell whether there is a frame to receive; not where the socket is closed."""
        # Asking for the events costs a tenth of an exception that says there are none.
        socket = self._socket
        return not socket.closed and bool(int(socket.getsockopt(zmq.EVENTS)) & READABLE)

    def arrived(self, received: list[int]) -> bytes | None:
        """Return what `receive` would; None where there is no frame, or the socket is closed."""
        return self.receive(received) if received or self.has_arrived() else None

    def send(self, frame: bytes, sent: list[int]) -> None:
        """Send a frame, unless `sent` says that it was.

        Raises:
            zmq.ZMQError: it was not sent; zmq.Again where the queue is full.
        """
        self._do(_SEND, frame, len(frame), sent)

    def receive(self, received: list[int]) -> bytes:
        """Return the next frame, or once more the last, if `received` says that it came.

        Raises:
            zmq.ZMQError: there is none, as zmq.Again, or it cannot be had.
        """
        self._do(_RECEIVE, self._buffer, MAX_FRAME_BYTES, received)
        # A longer one than may be is cut, and is no frame then.
        return ctypes.string_at(self._buffer, min(received[0], MAX_FRAME_BYTES))

    def _do(self, function: _Function, data: object, size: int, done: list[int]) -> None:
        while not done:
            if self._socket.closed:
                raise zmq.ZMQError(errno.ENOTSOCK)
            # Through a map, for nothing to come between the call and the note of it.
            result = map(function, (self._handle,), (data,), (size,), (DONTWAIT,))
            done.extend(filter(_succeeded, result))
            if not done:
                _check(ctypes.get_errno())


def _check(error: int) -> None:
    """Raise what a call has failed with, unless it is to be made again."""
    if error == errno.EAGAIN:
        raise zmq.Again(error)
    if error != errno.EINTR:
        raise zmq.ZMQError(error)


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
