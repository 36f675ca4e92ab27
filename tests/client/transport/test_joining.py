"""Messages that are joined: the same parts in the same order, in fewer envelopes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from storm_client.transport.joining import joined

from stormd.protocol import (
    RESTORE_FIELDS,
    Envelope,
    Ping,
    Release,
    Restore,
    RestoreParts,
    decode,
    encode,
    pack,
    unpack,
)


def restore(number: int) -> Envelope:
    message = Restore(ticket=number, entry=2, segment=3, offset=4, nbytes=5, sequence=6)
    return Envelope(number, message)


def test_restores_beside_each_other_are_joined() -> None:
    ping = Envelope(0, Ping())
    batch = [ping, ping, restore(1), restore(2), ping, restore(3)]
    assert list(joined(batch)) == [
        ping,
        ping,
        Envelope(0, RestoreParts(pack([1, 2, 3, 4, 5, 6, 2, 2, 3, 4, 5, 6]))),
        ping,
        restore(3),
    ]


def flat(batch: list[Envelope]) -> list[tuple[object, ...]]:
    """Return what is said of each part."""
    said: list[tuple[object, ...]] = []
    for _, message in batch:
        match message:
            case RestoreParts():
                said += unpack(message.places, RESTORE_FIELDS)
            case Restore():
                said.append(message.to_wire())
            case _:
                said.append((message,))
    return said


SINGLE = st.one_of(
    st.builds(restore, st.integers(1, 50)),
    st.builds(lambda n: Envelope(0, Release([n])), st.integers(0, 3)),
)


@given(st.lists(SINGLE, min_size=1, max_size=20))
def test_nothing_is_lost_or_moved(batch: list[Envelope]) -> None:
    made = list(joined(batch))
    assert flat(decode(encode(made))) == flat(batch)
    assert len(made) <= len(batch)
