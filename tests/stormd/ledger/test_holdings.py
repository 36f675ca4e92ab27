"""Entries and what they are charged for: what was given up goes back once, where it came from."""

from __future__ import annotations

import pytest

from stormd.ledger.holdings import Holdings, assert_session, assert_space
from stormd.ledger.records import NoRecords
from stormd.ledger.sessions import Entry, Session, SessionInfo
from stormd.memory.arena import Space, granules

NBYTES = 300


@pytest.fixture
def record() -> Session:
    return Session(
        info=SessionInfo(session=1, device="cpu", uid=0, pid=1, name="test"),
        part_bytes=4096,
        seen=0.0,
        segments={},
    )


@pytest.fixture
def space() -> Space:
    return Space(4096)


def stored(space: Space) -> Entry:
    assert space.promise(NBYTES)
    entry = Entry(
        raw_bytes=1000,
        codec="raw",
        since=0.0,
        promised=granules(NBYTES),
        charge=granules(NBYTES),
        space=space,
    )
    entry.block = space.place(NBYTES, NBYTES)
    return entry


def test_what_a_session_has_is_counted_once(record: Session, space: Space) -> None:
    holdings = Holdings(NoRecords())
    holdings.add(record, 1, stored(space))
    assert (holdings.entries, holdings.raw_bytes, record.used_bytes) == (1, 1000, 512)
    assert_session(record)
    assert_space(space, list(record.entries.values()))
    holdings.give_up(record, 1)
    assert (holdings.entries, holdings.raw_bytes, record.used_bytes) == (0, 0, 0)
    assert space.use().used == 0


def test_what_is_used_is_freed_when_it_no_longer_is(record: Session, space: Space) -> None:
    holdings = Holdings(NoRecords())
    holdings.add(record, 1, stored(space))
    record.entries[1].restores = 1
    holdings.give_up(record, 1)
    assert space.use().used == 512
    record.entries[1].restores = 0
    holdings.free_unused(record, 1)
    assert space.use().used == 0


def test_another_charge_counts_from_then_on(record: Session, space: Space) -> None:
    holdings = Holdings(NoRecords())
    holdings.add(record, 1, stored(space))
    holdings.charge(record, -256)
    assert record.used_bytes == 256
    with pytest.raises(AssertionError):
        assert_session(record)
