"""Frames: what goes in comes out, and whatever else arrives is a ProtocolError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormd.protocol import (
    CODECS,
    DEVICES,
    PROTOCOL_VERSION,
    REJECTIONS,
    RESTORE_FIELDS,
    RESTORED_FIELDS,
    STORED_FIELDS,
    CacheGet,
    CacheList,
    CachePut,
    Envelope,
    MapPiece,
    MapSegment,
    Message,
    Ping,
    ProtocolError,
    ReserveRange,
    RestoredParts,
    RestoreParts,
    Status,
    StatusRequest,
    StoredParts,
    StoreParts,
    decode,
    decode_each,
    encode,
    first_request,
    hello_version,
    message_types,
    pack,
    unpack,
)
from stormd.protocol.limits import (
    MAX_BATCH,
    MAX_COSTLY,
    MAX_ENTRY_BYTES,
    MAX_FRAME_BYTES,
    MAX_ID,
)

IDS = st.integers(0, MAX_ID)
TEXTS = st.text(max_size=20)
NAMES = st.text(min_size=1, max_size=20).filter(str.isprintable)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: IDS,
    bool: st.booleans(),
    str: TEXTS,
    bytes: st.binary(max_size=64),
    float: st.floats(0.001, 1e6),
    list[int]: st.lists(IDS, max_size=5),
    list[str]: st.lists(TEXTS, max_size=5),
    dict[str, Any]: st.dictionaries(TEXTS, IDS | TEXTS | st.none(), max_size=4),
}
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "device": st.sampled_from(DEVICES),
    "codec": st.sampled_from(CODECS),
    "reason": st.sampled_from(REJECTIONS),
    "part_bytes": st.integers(1 << 18, 1 << 30),
    "name": NAMES,
    "budget": st.text(min_size=1, max_size=16).filter(str.isprintable),
    "names": st.lists(NAMES, max_size=5),
}


def numbers(fields_: int) -> st.SearchStrategy[bytes]:
    """Return numbers of some parts, so many for each."""
    part = st.lists(IDS, min_size=fields_, max_size=fields_)
    parts = st.lists(part, min_size=1, max_size=3)
    return parts.map(lambda parts: pack([n for p in parts for n in p]))


ABOUT_PARTS: dict[type[Message], st.SearchStrategy[Message]] = {
    RestoreParts: st.builds(RestoreParts, numbers(RESTORE_FIELDS)),
    RestoredParts: st.builds(RestoredParts, numbers(RESTORED_FIELDS)),
    StoreParts: st.lists(
        st.tuples(*[IDS] * 3, st.integers(1, MAX_ENTRY_BYTES), IDS), min_size=1, max_size=3
    )
    .map(lambda parts: pack([n for part in parts for n in part]))
    .map(lambda places: StoreParts(dtype="uint8", codec="ancf", places=places)),
    StoredParts: st.builds(StoredParts, numbers(STORED_FIELDS), st.text(max_size=20)),
}


def messages(kind: type[Message]) -> st.SearchStrategy[Message]:
    if kind in ABOUT_PARTS:
        return ABOUT_PARTS[kind]
    hints = get_type_hints(kind)
    values: dict[str, st.SearchStrategy[Any]] = {}
    for field in kind.FIELDS:
        values[field] = BY_NAME.get(field, BY_TYPE[hints[field]])
        if field == "nbytes" and kind not in {MapSegment, ReserveRange, MapPiece}:
            values[field] = st.integers(1, 1 << 30)
    return st.builds(kind, **values)


ANY_MESSAGE = st.one_of([messages(kind) for kind in message_types().values()])
BATCHES = st.lists(st.builds(Envelope, IDS, ANY_MESSAGE), min_size=1, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(BATCHES)
def test_a_batch_comes_back_as_it_was(batch: list[Envelope]) -> None:
    assert decode(encode(batch)) == batch


@given(st.binary(max_size=300), st.integers(0, 90), st.lists(VALUES, max_size=11))
def test_any_bytes_or_fields_are_a_batch_or_a_protocol_error(
    frame: bytes, op: int, values: list[Any]
) -> None:
    check(frame)
    for value in (values, [[op, 1, *values]]):
        check(msgpack.packb(value))


@given(BATCHES, st.data())
def test_a_damaged_frame_is_a_batch_or_a_protocol_error(
    batch: list[Envelope], data: st.DataObject
) -> None:
    frame = bytearray(encode(batch))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    check(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


def check(frame: bytes) -> None:
    hello_version(frame)
    request = first_request(frame)
    try:
        batch = decode(frame)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            list(decode_each(frame))
        return
    assert batch
    assert request == batch[0].request
    if not any(isinstance(message, Status) for _, message in batch):
        assert list(decode_each(frame)) == batch
    for request, message in batch:
        assert 0 <= request <= MAX_ID
        assert isinstance(message, Message)


def test_what_is_no_batch_is_refused() -> None:
    for value in (
        [],
        {},
        [[]],
        [[7]],
        [["7", 1]],
        [[7, -1]],
        [[7, 1 << 63]],
        [[7, True]],
        [[True, 1]],
        [[7, 1, "more"]],
        [[0, 1]],
        [[255, 1]],
        [[7, 1]] * (MAX_BATCH + 1),
    ):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(value))


@pytest.mark.parametrize("read", [decode, lambda frame: list(decode_each(frame))])
def test_a_deeply_nested_frame_is_refused(read: Callable[[bytes], Any]) -> None:
    with pytest.raises(ProtocolError):
        read(b"\x91" * 100_000)


def test_of_a_message_of_very_many_values_little_is_read() -> None:
    """Whatever its frame holds, one message is read in a fraction of a millisecond."""
    lists = msgpack.packb([[6, 1, [[]] * MAX_BATCH]] * 100)
    numbers = msgpack.packb([[6, 1, [1] * (MAX_BATCH + 1)]])
    maps = msgpack.packb([[6, 1, {}]])
    for frame in (lists, numbers, maps):
        with pytest.raises(ProtocolError):
            next(decode_each(frame))


def test_messages_are_returned_up_to_the_first_that_is_not_valid() -> None:
    frame = msgpack.packb([[Ping.OP, 1], [Ping.OP, 2], [Ping.OP, -1], [Ping.OP, 3]])
    reading = decode_each(frame)
    assert [next(reading), next(reading)] == [Envelope(1, Ping()), Envelope(2, Ping())]
    with pytest.raises(ProtocolError):
        next(reading)


def test_a_frame_that_claims_to_be_huge_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(b"\xdd\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="limit"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_too_much_is_not_encoded() -> None:
    with pytest.raises(ProtocolError, match="4097 messages"):
        encode([Envelope(1, Ping())] * (MAX_BATCH + 1))
    with pytest.raises(ProtocolError, match="bytes"):
        encode([Envelope(1, Status({"text": "x" * MAX_FRAME_BYTES}))])


def test_few_of_what_costs_milliseconds_may_be_in_a_frame() -> None:
    """Others wait until a frame has been answered: 4,096 such requests would take seconds."""
    others = [Envelope(1, Ping())] * 1000
    put = CachePut(name="a", dtype="uint8", shape=[1], nbytes=1, part_bytes=1, ttl_seconds=0.0)
    for message in (StatusRequest(), CacheGet("a"), CacheList(""), put):
        costly = [Envelope(1, message)] * MAX_COSTLY
        assert len(decode(encode([*costly, *others]))) == 1000 + MAX_COSTLY
        with pytest.raises(ProtocolError, match=f"{MAX_COSTLY + 1} requests .* is {MAX_COSTLY}"):
            decode(encode([*costly, *others, Envelope(1, message)]))


def test_a_hello_of_any_version_says_which() -> None:
    assert hello_version(msgpack.packb([[1, 5, PROTOCOL_VERSION + 1, {"new": "shape"}]])) == (
        PROTOCOL_VERSION + 1
    )
    for value in ([[7, 1]], [[1, 5]], [[1, 5, "x"]], [], {}, 3, [[1, 5, None]], [[1, 5, 1e400]]):
        assert hello_version(msgpack.packb(value)) is None
    assert hello_version(b"\xc1") is None


def test_parts_in_one_frame_are_as_many_as_messages_at_the_most() -> None:
    """What a part costs the daemon does not depend on how many share a message."""
    half, part = MAX_BATCH // 2, bytes(8 * RESTORE_FIELDS)
    batch = [Envelope(0, RestoreParts(part * half))] * 2
    assert decode(encode(batch)) == batch
    with pytest.raises(ProtocolError, match=f"{MAX_BATCH + 1} parts"):
        decode(encode([*batch, Envelope(0, RestoreParts(part))]))


@given(st.lists(st.tuples(*[IDS] * RESTORE_FIELDS), max_size=20))
def test_packed_numbers_come_back(parts: list[tuple[int, ...]]) -> None:
    assert list(unpack(pack([n for part in parts for n in part]), RESTORE_FIELDS)) == parts


@pytest.mark.parametrize(
    "places",
    [
        b"",
        bytes(8),
        bytes(8 * RESTORE_FIELDS + 1),
        bytes(8 * RESTORE_FIELDS * (MAX_BATCH + 1)),
        pack([0, 0, -1, 0, 0, 0]),
        pack([0, 0, 0, 0, 0, -(1 << 63)]),
        [0] * RESTORE_FIELDS,
    ],
)
def test_packed_numbers_are_of_whole_parts_and_not_negative(places: Any) -> None:
    words = f"RestoreParts.places is .*not {RESTORE_FIELDS} numbers"
    with pytest.raises(ProtocolError, match=words):
        RestoreParts(places)
    frame = msgpack.packb([[RestoreParts.OP, 0, places]])
    with pytest.raises(ProtocolError, match="numbers of 8 bytes"):
        decode(frame)
