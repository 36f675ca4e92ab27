"""Answers of one frame in as few messages as may be: what is left out, and that the order stays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stormd.gateway.dispatch import joined
from stormd.protocol import (
    STORED_FIELDS,
    Admitted,
    Envelope,
    Message,
    Rejected,
    Restored,
    Stored,
    StoredParts,
    pack,
    unpack,
)

ANSWERS = st.lists(
    st.one_of(
        st.builds(Admitted, st.integers(0, 5)),
        st.builds(Stored, st.integers(0, 5), st.integers(0, 9), st.sampled_from(["raw", "window"])),
        st.builds(Restored, st.integers(0, 5)),
        st.builds(Rejected, st.integers(0, 5), st.just("quota"), st.just("")),
    )
)


def answers(*messages: Message) -> list[Envelope]:
    return [Envelope(number, message) for number, message in enumerate(messages)]


def test_neighbours_of_one_mode_are_joined() -> None:
    said = answers(
        Admitted(1),
        Admitted(2),
        Admitted(3),
        Stored(1, 10, "raw"),
        Stored(2, 20, "raw"),
        Restored(7),
        Stored(4, 40, "raw"),
        Stored(5, 50, "window"),
    )
    assert list(joined(said)) == [
        Envelope(2, Admitted(3)),
        Envelope(0, StoredParts(pack([1, 10, 2, 20]), "raw")),
        Envelope(5, Restored(7)),
        Envelope(0, Stored(4, 40, "raw")),
        Envelope(0, Stored(5, 50, "window")),
    ]


def flat(batch: list[Envelope]) -> list[Message]:
    said: list[Message] = []
    for _, message in batch:
        if isinstance(message, StoredParts):
            places = unpack(message.places, STORED_FIELDS)
            said += [Stored(entry, nbytes, message.mode) for entry, nbytes in places]
        else:
            said.append(message)
    return said


@given(ANSWERS)
def test_all_else_is_said_in_its_order(messages: list[Message]) -> None:
    stored = {message.entry for message in messages if isinstance(message, Stored)}
    expected = [
        message
        for message in messages
        if not isinstance(message, Admitted) or message.entry not in stored
    ]
    assert flat(list(joined(answers(*messages)))) == expected
