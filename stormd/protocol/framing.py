"""Frames: one ZeroMQ frame carries a batch of messages, each with a request number.

`decode` either returns only valid messages or raises ProtocolError, whatever the bytes are. It
never builds an object larger than the frame allows. An answer repeats its request's number; number
0 marks a message that answers no request (Stored, Failed of a store, Release).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgpack

from stormd.protocol.declaring import Message, message_types
from stormd.protocol.errors import ProtocolError
from stormd.protocol.fields import RESTORE_FIELDS, STORE_FIELDS
from stormd.protocol.limits import MAX_BATCH, MAX_COSTLY, MAX_FRAME_BYTES, MAX_ID
from stormd.protocol.messages import Hello, RestoreParts, Resume, StoreParts

__all__ = ["Envelope", "decode", "decode_each", "encode", "first_request", "hello_version"]


class Envelope(NamedTuple):
    """A message and the request number it carries."""

    request: int
    message: Message


_TYPES = message_types()

_NOT_MSGPACK = (ValueError, msgpack.exceptions.UnpackException, RecursionError)
"""The exceptions that msgpack raises for invalid bytes."""


def encode(batch: Iterable[Envelope]) -> bytes:
    """Return the frame of a batch.

    Raises:
        ProtocolError: the batch has more than MAX_BATCH messages or MAX_FRAME_BYTES bytes.
    """
    items = [(message.OP, request, *message.to_wire()) for request, message in batch]
    if len(items) > MAX_BATCH:
        raise ProtocolError(f"a batch of {len(items)} messages; the limit is {MAX_BATCH}")
    frame: bytes = msgpack.packb(items, use_bin_type=True)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> list[Envelope]:
    """Return the messages of a frame in their order.

    Raises:
        ProtocolError: the frame is no valid batch; no message of it was returned.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        batch = msgpack.unpackb(frame, raw=False, strict_map_key=True, use_list=True)
    except _NOT_MSGPACK as error:
        raise ProtocolError(f"a frame that is not msgpack: {error}") from error
    if type(batch) is not list or not 0 < len(batch) <= MAX_BATCH:
        raise ProtocolError(f"a frame must be a list of 1 to {MAX_BATCH} messages")
    envelopes = [_envelope(item) for item in batch]
    if len(envelopes) > MAX_COSTLY or len(frame) > _HARMLESS_BYTES:
        costly = sum(message.COSTLY for _, message in envelopes)
        _check_sums(costly, sum(_parts_of(message) for _, message in envelopes))
    return envelopes


def decode_each(frame: bytes) -> Iterator[Envelope]:
    """Return the messages of a frame one at a time, each in bounded time.

    Use it for frames with so many messages that decoding all at once would delay other clients. An
    invalid batch may yield some messages before the error.

    Raises:
        ProtocolError: as `decode`, at the message that is not valid. A message with a map is not
            valid; no client sends one.
    """
    lists = 0

    def count(found: list[Any]) -> list[Any]:
        nonlocal lists
        lists += 1
        if lists > _MAX_LISTS:
            raise ProtocolError(f"a message of more than {_MAX_LISTS} lists")
        return found

    reader = _reader(frame, list_hook=count)
    costly = parts = 0
    for _ in range(_batch_length(reader)):
        lists = 0
        envelope = _envelope(_read(reader))
        costly += envelope.message.COSTLY
        parts += _parts_of(envelope.message)
        _check_sums(costly, parts)
        yield envelope
    if reader.tell() != len(frame):
        raise ProtocolError(f"a frame with bytes after its {reader.tell()} of messages")


def hello_version(frame: bytes) -> int | None:
    """Return the protocol version in a frame's first message; None if that is no Hello or Resume.

    Only their first field is read, which has the same place in every version. So a peer of another
    version is told about the mismatch, whatever else it sends.
    """
    op, _, version = _first_numbers(frame, 3)
    return version if op in (Hello.OP, Resume.OP) else None


def first_request(frame: bytes) -> int:
    """Return the request number of a frame's first message, 0 if it has none.

    Nothing else is read: the sender is refused whatever the frame says.
    """
    _, request = _first_numbers(frame, 2)
    return request if request is not None and 0 <= request <= MAX_ID else 0


_FIRST_BYTES = 64
"""More bytes than the first numbers of a frame take, and few enough to read from any peer."""


def _first_numbers(frame: bytes, count: int) -> list[int | None]:
    """Return the first `count` values of a frame's first message, None for each that is no int."""
    found: list[int | None] = [None] * count
    reader = _reader(frame[:_FIRST_BYTES])
    try:
        reader.read_array_header()
        for place in range(min(count, reader.read_array_header())):
            value = reader.unpack()
            found[place] = value if type(value) is int else None
    except _NOT_MSGPACK:
        pass
    return found


_MAX_LISTS = 4
"""Maximum lists in a message, itself included; no message of a client has as many."""


def _reader(frame: bytes, **options: Any) -> msgpack.Unpacker:
    reader = msgpack.Unpacker(
        raw=False,
        strict_map_key=True,
        use_list=True,
        max_buffer_size=MAX_FRAME_BYTES,
        max_array_len=MAX_BATCH,
        max_map_len=0,
        max_ext_len=0,
        **options,
    )
    reader.feed(frame)
    return reader


def _batch_length(reader: msgpack.Unpacker) -> int:
    try:
        length = reader.read_array_header()
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"a frame that is no list of messages: {error}") from error
    if not 0 < length <= MAX_BATCH:
        raise ProtocolError(f"a frame must be a list of 1 to {MAX_BATCH} messages")
    return int(length)


def _read(reader: msgpack.Unpacker) -> Any:
    try:
        return reader.unpack()
    except ProtocolError:
        raise
    except _NOT_MSGPACK as error:
        raise ProtocolError(f"a frame that is not msgpack: {error}") from error


def _check_sums(costly: int, parts: int) -> None:
    if costly > MAX_COSTLY:
        raise ProtocolError(
            f"a frame with {costly} requests for a state, a put, a get or a list; "
            f"the limit is {MAX_COSTLY}: send the others in frames of their own"
        )
    if parts > MAX_BATCH:
        raise ProtocolError(
            f"a frame with {parts} parts to store or restore; the limit is {MAX_BATCH}: send the "
            "others in another frame"
        )


_HARMLESS_BYTES = 8 * min(RESTORE_FIELDS, STORE_FIELDS) * MAX_BATCH
"""A frame of at most so many bytes cannot have too many chunks: each number takes eight bytes."""


def _parts_of(message: Message) -> int:
    if type(message) is RestoreParts:
        return len(message.places) // (8 * RESTORE_FIELDS)
    if type(message) is StoreParts:
        return len(message.places) // (8 * STORE_FIELDS)
    return 0


def _envelope(item: Any) -> Envelope:
    if type(item) is not list or len(item) < 2:
        raise ProtocolError("a message must be a list that opens with its number and request")
    op, request, *values = item
    kind = _TYPES.get(op) if type(op) is int else None
    if kind is None:
        raise ProtocolError(f"message number {op!r:.40} is unknown to this version")
    if type(request) is not int or not 0 <= request <= MAX_ID:
        raise ProtocolError(f"request number {request!r:.40} is not in 0 .. 2^63-1")
    return Envelope(request, kind.from_wire(values))
