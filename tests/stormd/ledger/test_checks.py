"""Admission: each thing that a client may say wrong has its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stormd.ledger.holdings import Shares
from stormd.ledger.restores import MAX_RESTORES, restore_problem
from stormd.ledger.segments import segment_problem
from stormd.ledger.sessions import Entry, Limits, Phase, Session, SessionInfo, Ticket
from stormd.ledger.stores import share_problem, store_problem
from stormd.memory.arena import Space
from stormd.protocol import MapSegment, Store

LIMITS = Limits(max_sessions=1, max_entries=2, quota_bytes=0, lease_seconds=5.0)
RIGHT: dict[str, Any] = {
    "entry": 5, "segment": 0, "offset": 0, "nbytes": 100,
    "dtype": "uint8", "codec": "raw", "sequence": 0,
}  # fmt: skip
STORE = Store(**RIGHT)
INTO = (0, 0, 100)


@pytest.fixture
def session() -> Session:
    info = SessionInfo(session=1, device="cpu", uid=0, pid=1, name="test")
    record = Session(
        info=info, chunk_bytes=4096, seen=0.0, segments={0: 8192}, phase=Phase.ATTACHED
    )
    record.entries[3] = Entry(
        raw_bytes=100, codec="raw", since=0.0, promised=512, charge=512, space=Space(0)
    )
    record.last_entry = 3
    record.used_bytes = 512
    return record


def test_what_is_right_passes(session: Session) -> None:
    assert store_problem(session, STORE, LIMITS, user_bytes=0, draining=False) is None
    assert restore_problem(session, 1, 3, *INTO) is None
    assert segment_problem(session, MapSegment(segment=1, handle=b"", nbytes=1)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"entry": 3}, "follow"),
        ({"nbytes": 4097}, "limit is 4096"),
        ({"offset": 8093}, "outside"),
        ({"segment": 1}, "not mapped"),
    ],
)
def test_an_invalid_store_is_explained(
    session: Session, changes: dict[str, int], words: str
) -> None:
    problem = store_problem(
        session, Store(**(RIGHT | changes)), LIMITS, user_bytes=0, draining=False
    )
    assert problem is not None
    assert problem[0] == "invalid"
    assert words in problem[1]


def test_the_last_byte_of_a_segment_may_be_used(session: Session) -> None:
    assert (
        store_problem(
            session, Store(**(RIGHT | {"offset": 8092})), LIMITS, user_bytes=0, draining=False
        )
        is None
    )


def test_limits_are_told_apart(session: Session) -> None:
    quota = replace(LIMITS, quota_bytes=1023)
    assert store_problem(session, STORE, quota, user_bytes=0, draining=False) is not None
    assert (
        store_problem(
            session, STORE, replace(quota, quota_bytes=1024), user_bytes=0, draining=False
        )
        is None
    )
    few = store_problem(
        session, STORE, replace(LIMITS, max_entries=1), user_bytes=0, draining=False
    )
    assert few is not None
    assert few[0] == "too_many_entries"
    drained = store_problem(session, STORE, LIMITS, user_bytes=0, draining=True)
    assert drained is not None
    assert drained[0] == "draining"


def test_restores_are_limited(session: Session) -> None:
    for number in range(2, MAX_RESTORES + 2):
        session.tickets[number] = Ticket(entry=3, request=0, since=0.0, together=False)
    problem = restore_problem(session, 1, 3, *INTO)
    assert problem is not None
    assert problem[0] == "QuotaExceeded"


def test_a_ticket_under_way_is_taken(session: Session) -> None:
    session.tickets[1] = Ticket(entry=3, request=0, since=0.0, together=False)
    problem = restore_problem(session, 1, 3, *INTO)
    assert problem is not None
    assert "under way" in problem[1]


def test_nothing_goes_without_a_lifeline(session: Session) -> None:
    session.phase = Phase.OPENED
    assert store_problem(session, STORE, LIMITS, user_bytes=0, draining=False) is not None
    assert restore_problem(session, 1, 3, *INTO) is not None
    assert segment_problem(session, MapSegment(segment=1, handle=b"", nbytes=1)) is not None


def test_a_segment_has_its_own_number_and_a_size(session: Session) -> None:
    session.mapping[2] = (0, 10)
    for message in (
        MapSegment(segment=0, handle=b"", nbytes=1),
        MapSegment(segment=2, handle=b"", nbytes=1),
        MapSegment(segment=3, handle=b"", nbytes=0),
    ):
        assert segment_problem(session, message) is not None


def test_a_users_sessions_share_a_quota(session: Session) -> None:
    limits = replace(LIMITS, user_quota_bytes=2048)
    assert store_problem(session, STORE, limits, user_bytes=1536, draining=False) is None
    problem = store_problem(session, STORE, limits, user_bytes=1537, draining=False)
    assert problem is not None
    assert problem[0] == "quota"
    assert "uid_quota_bytes" in problem[1]


def test_what_is_kept_for_others_is_not_given(session: Session) -> None:
    shares, limits = Shares(), replace(LIMITS, max_sessions=2, share_bytes=1024)
    shares.set_share(1024, (512, 1024 + 256))
    assert share_problem(session, shares, limits, 4096, 512) is None
    assert share_problem(session, shares, limits, 4096, 512 + 1792) is None
    problem = share_problem(session, shares, limits, 4096, 512 + 1793)
    assert problem is not None
    assert "session_share_bytes" in problem
    assert share_problem(session, shares, LIMITS, 4096, 1 << 20) is None
