"""The types of message fields, and the words and numbers that some of them may hold.

StoreParts and similar messages send the values of each chunk as packed numbers (`pack`), eight
bytes each. As msgpack integers they took 2.5 times as long to check and to read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from stormd.protocol.declaring import (
    binary,
    flag,
    integer,
    list_of,
    mapping,
    name,
    numbers,
    one_of,
    seconds,
    text,
)
from stormd.protocol.limits import (
    MAX_BATCH,
    MAX_BUDGET,
    MAX_ENTRY_BYTES,
    MAX_FEATURES,
    MAX_HANDLE_BYTES,
    MAX_ID,
    MAX_TEXT,
)

__all__ = [
    "CODECS",
    "DEVICES",
    "ENTRIES_A_PAGE",
    "ID",
    "NO_LANE",
    "REJECTIONS",
    "RESTORED_FIELDS",
    "RESTORE_FIELDS",
    "STORED_FIELDS",
    "STORE_FIELDS",
    "Binary",
    "BudgetText",
    "Codec",
    "Device",
    "Flag",
    "Id",
    "Ids",
    "PartBytes",
    "Rejection",
    "RestorePlaces",
    "RestoredPlaces",
    "Seconds",
    "SecondsOrNone",
    "State",
    "StorePlaces",
    "StoredPlaces",
    "Text",
    "Texts",
    "pack",
    "unpack",
]

DEVICES = ("cpu", "cuda")
"""The device types that have a lane."""

NO_LANE = "none"
"""The value of Hello.device for a session without a lane."""

CODECS = ("ancf", "raw")
REJECTIONS = ("pool_full", "quota", "too_many_entries", "draining", "invalid")
"""The reasons for which Rejected answers a Store."""

RESTORE_FIELDS: Final = 6
"""Numbers of one chunk in RestoreParts."""

RESTORED_FIELDS: Final = 1
"""Numbers of one chunk in RestoredParts."""

STORE_FIELDS: Final = 5
"""Numbers of one chunk in StoreParts."""

STORED_FIELDS: Final = 2
"""Numbers of one chunk in StoredParts."""

ENTRIES_A_PAGE: Final = MAX_BATCH
"""Maximum entries in one Entries message."""


# --- the types of fields --------------------------------------------------------------------

ID = integer(0, MAX_ID, "an integer in 0 .. 2^63-1")

Id = Annotated[int, ID]
"""An id, offset, size or number."""

Ids = Annotated[list[int], list_of(ID, MAX_BATCH, "ids")]

PartBytes = Annotated[int, integer(1, MAX_ENTRY_BYTES, f"in 1 .. {MAX_ENTRY_BYTES} bytes")]
"""The bytes of an entry before encoding."""

Text = Annotated[str, text(MAX_TEXT)]
Texts = Annotated[list[str], list_of(text(MAX_TEXT), MAX_FEATURES, "texts")]
Binary = Annotated[bytes, binary(MAX_HANDLE_BYTES)]
Seconds = Annotated[float, seconds(above_zero=True)]
SecondsOrNone = Annotated[float, seconds(above_zero=False)]
Flag = Annotated[bool, flag()]
Device = Annotated[str, one_of(*DEVICES, NO_LANE)]
Codec = Annotated[str, one_of(*CODECS)]
Rejection = Annotated[str, one_of(*REJECTIONS)]
BudgetText = Annotated[str, name(MAX_BUDGET)]
State = Annotated[dict[str, Any], mapping()]
RestorePlaces = Annotated[bytes, numbers(RESTORE_FIELDS, MAX_BATCH, "parts")]
RestoredPlaces = Annotated[bytes, numbers(RESTORED_FIELDS, MAX_BATCH, "parts")]
StorePlaces = Annotated[bytes, numbers(STORE_FIELDS, MAX_BATCH, "parts")]
StoredPlaces = Annotated[bytes, numbers(STORED_FIELDS, MAX_BATCH, "parts")]


def pack(values: Sequence[int]) -> bytes:
    """Return the numbers in the packed form that these messages carry.

    Raises:
        struct.error: a number is not in -2^63 .. 2^63-1.
    """
    return struct.pack(f"<{len(values)}q", *values)


def unpack(places: bytes, fields: int) -> Iterator[tuple[int, ...]]:
    """Return a tuple of `fields` numbers for each chunk; the message has checked `places`."""
    return _LAYOUTS[fields].iter_unpack(places)


_LAYOUTS = {
    n: struct.Struct(f"<{n}q")
    for n in (RESTORE_FIELDS, RESTORED_FIELDS, STORE_FIELDS, STORED_FIELDS)
}
