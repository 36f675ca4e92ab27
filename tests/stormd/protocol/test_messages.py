"""Messages: one that exists is valid; the numbers on the wire do not move."""

from __future__ import annotations

from typing import Any

import pytest

from stormd.protocol import (
    Hello,
    MapSegment,
    Message,
    PlanLearned,
    ProtocolError,
    Rejected,
    Release,
    RestoredParts,
    RestoreParts,
    Status,
    Store,
    StoredParts,
    StoreParts,
    message_types,
    pack,
)
from stormd.protocol.declaring import message
from stormd.protocol.limits import (
    MAX_BATCH,
    MAX_BUDGET,
    MAX_ENTRY_BYTES,
    MAX_HANDLE_BYTES,
    MAX_ID,
    MAX_TEXT,
)

STORE: dict[str, Any] = {
    "entry": 1,
    "segment": 0,
    "offset": 0,
    "nbytes": 1,
    "dtype": "uint8",
    "codec": "raw",
    "sequence": 0,
}
PLAN: dict[str, Any] = {
    "kept_bytes": 0,
    "offloaded_bytes": 1,
    "replayed_bytes": 2,
    "budget": "least",
}
HELLO: dict[str, Any] = {
    "protocol": 1,
    "features": [],
    "pid": 1,
    "uid": 0,
    "device": "cpu",
    "device_uuid": "",
    "staging_bytes": 0,
    "name": "",
}


def test_the_numbers_on_the_wire_are_part_of_the_protocol() -> None:
    assert {op: kind.__name__ for op, kind in message_types().items()} == {
        1: "Hello",
        2: "MapSegment",
        3: "UnmapSegment",
        4: "Store",
        5: "Restore",
        6: "Release",
        7: "Ping",
        8: "StatusRequest",
        9: "Goodbye",
        10: "PlanLearned",
        16: "CachePut",
        17: "CacheCommit",
        18: "CacheCancel",
        19: "CacheGet",
        20: "CacheFind",
        21: "CacheDelete",
        22: "CacheList",
        11: "Resume",
        12: "ListEntries",
        13: "PassOver",
        14: "ReserveRange",
        15: "MapPiece",
        23: "RestoreParts",
        24: "StoreParts",
        64: "Welcome",
        65: "Mapped",
        66: "Admitted",
        67: "Rejected",
        68: "Stored",
        69: "Restored",
        70: "Failed",
        71: "Pong",
        72: "Status",
        73: "Refused",
        74: "Entries",
        77: "RestoredParts",
        78: "StoredParts",
        80: "CacheReady",
        81: "CacheTensor",
        82: "CacheFound",
        83: "CacheNames",
    }


def test_what_has_several_numbers_is_made_by_their_names() -> None:
    with pytest.raises(TypeError):
        Store(*STORE.values())


def test_two_messages_cannot_have_one_number() -> None:
    with pytest.raises(TypeError, match="Ping are both 7"):
        message(7)(type("Other", (Message,), {"__annotations__": {}}))


def test_numbers_are_within_bounds() -> None:
    for name in ("entry", "segment", "offset", "sequence"):
        for value in (-1, MAX_ID + 1, 1.0, True, None, "1"):
            with pytest.raises(ProtocolError, match=f"Store.{name}"):
                Store(**{**STORE, name: value})
    for value in (0, -1, MAX_ENTRY_BYTES + 1, 1.5, False):
        with pytest.raises(ProtocolError, match=r"Store.nbytes"):
            Store(**{**STORE, "nbytes": value})


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (Store, {**STORE, "codec": "zip"}),
        (Store, {**STORE, "dtype": "x" * (MAX_TEXT + 1)}),
        (Store, {**STORE, "dtype": b"uint8"}),
        (Hello, {**HELLO, "device": "tpu"}),
        (PlanLearned, {**PLAN, "kept_bytes": -1}),
        (PlanLearned, {**PLAN, "offloaded_bytes": MAX_ID + 1}),
        (PlanLearned, {**PLAN, "replayed_bytes": 1.0}),
        (PlanLearned, {**PLAN, "budget": ""}),
        (PlanLearned, {**PLAN, "budget": "x" * (MAX_BUDGET + 1)}),
        (PlanLearned, {**PLAN, "budget": "\n"}),
        (Hello, {**HELLO, "features": "all"}),
        (Hello, {**HELLO, "features": [1]}),
        (Hello, {**HELLO, "features": ["x"] * 65}),
        (MapSegment, {"segment": 1, "handle": "text", "nbytes": 1}),
        (
            MapSegment,
            {"segment": 1, "handle": bytes(MAX_HANDLE_BYTES + 1), "nbytes": 1},
        ),
        (Release, {"entries": (1, 2)}),
        (Release, {"entries": [1, -2]}),
        (Release, {"entries": [1] * (MAX_BATCH + 1)}),
        (Rejected, {"entry": 1, "reason": "because", "detail": ""}),
        (Status, {"state": []}),
        (RestoreParts, {"places": pack([1] * 5)}),
        (RestoredParts, {"places": pack([-MAX_ID])}),
        (StoreParts, {"dtype": "uint8", "codec": "raw", "places": pack([1] * 6)}),
        (StoreParts, {"dtype": "uint8", "codec": "raw", "places": pack([1, 0, 0, 0, 0])}),
        (StoreParts, {"dtype": "uint8", "codec": "raw", "places": pack([1, 0, 0, MAX_ID, 0])}),
        (StoreParts, {"dtype": "uint8", "codec": "zip", "places": pack([1, 0, 0, 1, 0])}),
        (StoredParts, {"places": pack([1]), "mode": "raw"}),
    ],
)
def test_what_is_not_valid_does_not_exist(make: type[Message], changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        make(**changes)
    assert len(str(caught.value)) < 300, "what it was given is named in short"


def test_a_message_stays_as_it_was_checked() -> None:
    made = Store(**STORE)
    assert made.to_wire()[:4] == (1, 0, 0, 1), "in the order of its fields"
    with pytest.raises(AttributeError, match=r"Store\.entry cannot be set"):
        made.entry = -1  # type: ignore[misc]
    assert made == Store(**STORE) != Store(**{**STORE, "entry": 2})
    assert hash(made) == hash(Store(**STORE))
    assert repr(made) == (
        "Store(entry=1, segment=0, offset=0, nbytes=1, dtype='uint8', codec='raw', sequence=0)"
    )
