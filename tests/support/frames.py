"""Frames as nobody should send them: mutations of real ones, and noise.

What stays true: the same seed gives the same frames. Roughly a third decode to messages, so that
what lies behind the decoder is reached as well as the decoder itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack

from stormd.protocol import (
    CACHE_FEATURE,
    PROTOCOL_VERSION,
    CacheCancel,
    CacheCommit,
    CacheDelete,
    CacheFind,
    CacheGet,
    CacheList,
    CachePut,
    Envelope,
    Goodbye,
    Hello,
    ListEntries,
    MapPiece,
    MapSegment,
    Message,
    Ping,
    PlanLearned,
    Release,
    ReserveRange,
    Restore,
    RestoreParts,
    Resume,
    StatusRequest,
    Store,
    Stored,
    StoreParts,
    UnmapSegment,
    encode,
    pack,
)
from stormd.protocol.limits import FIRST_LEASED, MAX_ENTRY_BYTES, MAX_FRAME_BYTES, MAX_ID

__all__ = ["FrameFuzzer"]

SPECIAL: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 255, 256, 4096, 1 << 20, MAX_ENTRY_BYTES, MAX_ENTRY_BYTES + 1),
    *(FIRST_LEASED, FIRST_LEASED + 1, MAX_ID, MAX_ID + 1, (1 << 64) - 1, -(1 << 63)),
    *(None, True, 0.0, -1.5, float("inf"), float("nan")),
    *("", "cpu", "cuda", "ancf", "raw", "bfloat16", "\0", "ä" * 300, "x" * 5000),
    *(b"", b"\0" * 16, b"\xff" * 600, [], [[]], [0] * 300, {}, {"a": [1]}, {"": None}),
)
"""Values at the limits of the protocol's checks, and of types that no field has."""


class FrameFuzzer:
    """An endless source of frames. `uid` makes the Hellos among them come from the right user."""

    def __init__(self, seed: int, uid: int) -> None:
        self._random = random.Random(seed)
        self._uid = uid
        self._entry = 0
        self._kinds: tuple[Callable[[], bytes], ...] = (
            self._real,
            self._changed_fields,
            self._changed_fields,
            self._changed_shape,
            self._changed_bytes,
            self._changed_bytes,
            self._noise,
        )

    def frame(self) -> bytes:
        """Return the next frame, of at most MAX_FRAME_BYTES."""
        return self._random.choice(self._kinds)()[:MAX_FRAME_BYTES]

    # --- kinds of frames --------------------------------------------------------------------

    def _real(self) -> bytes:
        batch = [
            Envelope(self._number(), self._message()) for _ in range(self._random.randint(1, 4))
        ]
        return encode(batch)

    def _changed_fields(self) -> bytes:
        """A real batch in which some fields have values of another size or type."""
        batch = self._unpacked()
        for _ in range(self._random.randint(1, 3)):
            message = self._random.choice(batch)
            message[self._random.randrange(len(message))] = self._random.choice(SPECIAL)
        return _packed(batch)

    def _changed_shape(self) -> bytes:
        """A real batch with fields too many, too few, out of order, or nested."""
        batch = self._unpacked()
        message = self._random.choice(batch)
        change = self._random.randrange(5)
        if change == 0:
            message.append(self._random.choice(SPECIAL))
        elif change == 1:
            message.pop()
        elif change == 2:
            self._random.shuffle(message)
        elif change == 3:
            batch[0] = [batch[0]]
        else:
            batch *= self._random.choice((2, 10, 200))
        return _packed(batch)

    def _changed_bytes(self) -> bytes:
        """A real frame with bits flipped, bytes put in, taken out or cut off."""
        frame = bytearray(self._real())
        for _ in range(self._random.choice((1, 1, 2, 8))):
            place = self._random.randrange(len(frame))
            change = self._random.randrange(4)
            if change == 0:
                frame[place] ^= 1 << self._random.randrange(8)
            elif change == 1:
                frame.insert(place, self._random.randrange(256))
            elif change == 2:
                frame[place] = self._random.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
            elif len(frame) > 1:
                del frame[place:]
                frame += b"\0"
        return bytes(frame)

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 16, 200, 5000)))

    # --- parts ------------------------------------------------------------------------------

    def _unpacked(self) -> list[list[Any]]:
        batch: list[list[Any]] = msgpack.unpackb(self._real())
        return batch

    def _number(self) -> int:
        return self._random.choice((0, 1, self._random.randrange(1 << 20), MAX_ID))

    def _known(self) -> int:
        """Return the number of an entry, most often one that was stored not long ago."""
        return max(0, self._entry - self._random.choice((0, 0, 1, 2, 5, -1)))

    def _message(self) -> Message:
        choice = self._random
        size = choice.choice((4096, 4096, 4096, 1, 255, 65536))
        offset = choice.choice((0, 0, 0, 0, 0, 0, 64, 65536, 1 << 30))
        name = choice.choice(("a", "b", "teacher/logits"))
        kind = choice.randrange(20)
        if kind < 6:
            self._entry += 1
            codec = choice.choice(("ancf", "raw"))
            return Store(
                entry=self._entry,
                segment=0,
                offset=offset,
                nbytes=size,
                dtype="uint8",
                codec=codec,
                sequence=choice.choice((0, 0, 1)),
            )
        if kind < 10:
            return Restore(
                ticket=choice.randrange(1, 50),
                entry=self._known(),
                segment=0,
                offset=offset,
                nbytes=size,
                sequence=0,
            )
        if kind < 12:
            return Release([self._known() for _ in range(choice.randrange(5))])
        others: tuple[Callable[[], Message], ...] = (
            lambda: self._restores(size, offset),
            lambda: self._stores(size, offset),
            Ping,
            StatusRequest,
            self._hello,
            lambda: self._cache_message(name, size),
            lambda: MapSegment(segment=choice.randrange(4), handle=b"h" * 64, nbytes=size),
            lambda: ReserveRange(segment=choice.randrange(4), nbytes=size),
            lambda: MapPiece(
                segment=self._known(), into=choice.randrange(4), offset=0, nbytes=size
            ),
            lambda: UnmapSegment(choice.randrange(1, 4)),
            lambda: PlanLearned(
                kept_bytes=size, offloaded_bytes=offset, replayed_bytes=0, budget=name
            ),
            lambda: ListEntries(self._known()),
            lambda: Resume(
                protocol=PROTOCOL_VERSION,
                epoch=size,
                session=self._known(),
                secret=b"s" * 16,
                pid=1,
                uid=self._uid,
            ),
            lambda: Goodbye() if choice.randrange(2) else Ping(),
            lambda: Stored(self._known(), size, "raw"),  # the daemon's own, from a client
        )
        return choice.choice(others)()

    def _hello(self) -> Hello:
        features = self._random.choice(([], [], [CACHE_FEATURE], ["unknown"]))
        device = self._random.choice(("cpu", "cpu", "cuda"))
        staging = self._random.choice((0, 1 << 16, MAX_ID))
        return Hello(
            protocol=PROTOCOL_VERSION,
            features=features,
            pid=1,
            uid=self._uid,
            device=device,
            device_uuid="",
            staging_bytes=staging,
            name="fuzzer",
        )

    def _restores(self, size: int, offset: int) -> Message:
        choice = self._random
        tickets = [
            number
            for _ in range(choice.randrange(1, 5))
            for number in (choice.randrange(1, 50), self._known(), 0, offset, size, 0)
        ]
        return RestoreParts(pack(tickets))

    def _stores(self, size: int, offset: int) -> Message:
        choice = self._random
        places: list[int] = []
        for _ in range(choice.randrange(1, 5)):
            self._entry += 1
            entry = self._known() if choice.random() < 0.2 else self._entry
            sequence = choice.choice((0, 0, 1, MAX_ID))
            places += entry, choice.choice((0, 0, 0, 1)), offset, max(1, size), sequence
        dtype = choice.choice(("uint8", "bfloat16", "no such type"))
        codec = choice.choice(("raw", "ancf"))
        return StoreParts(dtype=dtype, codec=codec, places=pack(places))

    def _cache_message(self, name: str, size: int) -> Message:
        messages: tuple[Callable[[], Message], ...] = (
            lambda: CachePut(
                name=name,
                dtype="uint8",
                shape=[size],
                nbytes=size,
                part_bytes=1 << 18,
                ttl_seconds=1.0,
            ),
            lambda: CacheCommit([self._known()]),
            CacheCancel,
            lambda: CacheGet(name),
            lambda: CacheFind(name),
            lambda: CacheDelete(name),
            lambda: CacheList(name),
        )
        return self._random.choice(messages)()


def _packed(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except (OverflowError, ValueError):  # an integer of more than 64 bits
        return b"\xc1"
    return packed
