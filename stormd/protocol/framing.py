"""Frames: one ZeroMQ frame carries a batch of messages, each with a request number.

`decode` either returns valid messages only or raises ProtocolError, whatever the bytes are, and
never builds an object larger than the frame allows. A request number other than 0 is echoed in its
answer; 0 marks a message that answers nothing (Stored, Failed of a store, Release).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgpack

import stormd.protocol.cache_messages  # noqa: F401 - declares its messages
from stormd.protocol.declaring import Message, message_types
from stormd.protocol.errors import ProtocolError
from stormd.protocol.limits import MAX_BATCH, MAX_COSTLY, MAX_FRAME_BYTES, MAX_ID
from stormd.protocol.messages import RESTORE_FIELDS, Hello, RestoreParts

__all__ = ["Envelope", "decode", "encode", "hello_version"]


class Envelope(NamedTuple):
    """A message and the request number it carries."""

    request: int
    message: Message


_TYPES = message_types()


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
        ProtocolError: the frame is no valid batch; none of its messages has been returned.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    batch = _unpack(frame)
    if type(batch) is not list or not 0 < len(batch) <= MAX_BATCH:
        raise ProtocolError(f"a frame must be a list of 1 to {MAX_BATCH} messages")
    envelopes = [_envelope(item) for item in batch]
    if len(envelopes) > MAX_COSTLY:
        _check_costs(envelopes)
    if len(frame) > _HARMLESS_BYTES:
        _check_parts(envelopes)
    return envelopes


def hello_version(frame: bytes) -> int | None:
    """Return the version that a frame's Hello speaks, None where the frame opens with no Hello.

    Only the first field of Hello is looked at: it stays in its place in every version, so that a
    peer of another version is told about the mismatch whatever else it sends.
    """
    try:
        op, _, version = _unpack(frame)[0][:3]
    except (ProtocolError, TypeError, ValueError, LookupError):
        return None
    return version if op == Hello.OP and type(version) is int else None


def _unpack(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"a frame that is not msgpack: {error}") from error


def _check_costs(batch: list[Envelope]) -> None:
    costly = sum(message.COSTLY for _, message in batch)
    if costly > MAX_COSTLY:
        raise ProtocolError(
            f"a frame with {costly} requests for a state, a put, a get or a list of names; "
            f"the limit is {MAX_COSTLY}: send the others in frames of their own"
        )


_HARMLESS_BYTES = 8 * RESTORE_FIELDS * MAX_BATCH
"""A frame of no more bytes has no more parts than it may have: each number takes eight."""


def _check_parts(batch: list[Envelope]) -> None:
    places = sum(len(one.places) for _, one in batch if type(one) is RestoreParts)
    parts = places // (8 * RESTORE_FIELDS)
    if parts > MAX_BATCH:
        raise ProtocolError(
            f"a frame with {parts} parts to restore; the limit is {MAX_BATCH}: send the others in "
            "another frame"
        )


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
