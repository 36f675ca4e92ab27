"""Messages that are joined: the same parts in the same order, in fewer envelopes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from storm_client.joining import joined

from stormd.protocol import (
    RESTORE_FIELDS,
    STORE_FIELDS,
    Envelope,
    Ping,
    Release,
    Restore,
    RestoreParts,
    StoreParts,
    decode,
    encode,
    pack,
    unpack,
)


def restore(number: int) -> Envelope:
    message = Restore(ticket=number, entry=2, segment=3, offset=4, nbytes=5, sequence=6)
    return Envelope(number, message)


def part(run: int, index: int) -> Envelope:
    return Envelope(run + index, StoreParts(run=run, places=pack([index, 0, 1, 2, 3])))


def test_neighbours_of_a_kind_are_joined() -> None:
    batch = [part(8, 0), part(8, 1), part(9, 0), restore(1), restore(2), Envelope(0, Ping())]
    assert list(joined(batch)) == [
        Envelope(0, StoreParts(run=8, places=pack([0, 0, 1, 2, 3, 1, 0, 1, 2, 3]))),
        part(9, 0),
        Envelope(0, RestoreParts(pack([1, 2, 3, 4, 5, 6, 2, 2, 3, 4, 5, 6]))),
        Envelope(0, Ping()),
    ]


def flat(batch: list[Envelope]) -> list[tuple[object, ...]]:
    """Return what is said of each part."""
    said: list[tuple[object, ...]] = []
    for _, message in batch:
        match message:
            case StoreParts():
                said += [(message.run, *one) for one in unpack(message.places, STORE_FIELDS)]
            case RestoreParts():
                said += unpack(message.places, RESTORE_FIELDS)
            case Restore():
                said.append(message.to_wire())
            case _:
                said.append((message,))
    return said


SINGLE = st.one_of(
    st.builds(part, st.integers(100, 102), st.integers(0, 5)),
    st.builds(restore, st.integers(1, 50)),
    st.builds(lambda n: Envelope(0, Release([n])), st.integers(0, 3)),
)


@given(st.lists(SINGLE, min_size=1, max_size=20))
def test_nothing_is_lost_or_moved(batch: list[Envelope]) -> None:
    made = list(joined(batch))
    assert flat(decode(encode(made))) == flat(batch)
    assert len(made) <= len(batch)
