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


def test_what_is_right_passes_and_needs_a_lifeline(session: Session) -> None:
    segment = MapSegment(segment=1, handle=b"", nbytes=1)
    last_byte = Store(**(RIGHT | {"offset": 8092}))
    for phase, passes in ((Phase.ATTACHED, True), (Phase.OPENED, False)):
        session.phase = phase
        for problem in (
            store_problem(session, STORE, LIMITS, user_bytes=0, draining=False),
            store_problem(session, last_byte, LIMITS, user_bytes=0, draining=False),
            restore_problem(session, 1, 3, *INTO),
            segment_problem(session, segment),
        ):
            assert (problem is None) is passes


@pytest.mark.parametrize(
    ("changes", "limits", "reason", "words"),
    [
        ({"entry": 3}, {}, "invalid", "follow"),
        ({"nbytes": 4097}, {}, "invalid", "limit is 4096"),
        ({"offset": 8093}, {}, "invalid", "outside"),
        ({"segment": 1}, {}, "invalid", "not mapped"),
        ({}, {"quota_bytes": 1023}, "quota", ""),
        ({}, {"user_quota_bytes": 2047}, "quota", "uid_quota_bytes"),
        ({}, {"max_entries": 1}, "too_many_entries", ""),
    ],
)
def test_a_store_that_may_not_be_is_explained(
    session: Session, changes: dict[str, int], limits: dict[str, int], reason: str, words: str
) -> None:
    store, limited = Store(**(RIGHT | changes)), replace(LIMITS, **limits)
    problem = store_problem(session, store, limited, user_bytes=1536, draining=False)
    assert problem[0] == reason
    assert words in problem[1]
    if reason == "quota":
        just = replace(LIMITS, **{name: value + 1 for name, value in limits.items()})
        assert store_problem(session, STORE, just, user_bytes=1536, draining=False) is None


def test_restores_are_limited_and_their_tickets_are_their_own(session: Session) -> None:
    session.tickets[1] = Ticket(entry=3, request=0, since=0.0, together=False)
    problem = restore_problem(session, 1, 3, *INTO)
    assert "under way" in problem[1]
    for number in range(2, MAX_RESTORES + 1):
        session.tickets[number] = Ticket(entry=3, request=0, since=0.0, together=False)
    problem = restore_problem(session, MAX_RESTORES + 1, 3, *INTO)
    assert problem[0] == "QuotaExceeded"


def test_a_segment_has_its_own_number_and_a_size(session: Session) -> None:
    session.mapping[2] = (0, 10)
    for number, nbytes in ((0, 1), (2, 1), (3, 0)):
        message = MapSegment(segment=number, handle=b"", nbytes=nbytes)
        assert segment_problem(session, message) is not None


def test_what_is_kept_for_others_is_not_given(session: Session) -> None:
    shares, limits = Shares(), replace(LIMITS, max_sessions=2, share_bytes=1024)
    shares.set_share(1024, (512, 1024 + 256))
    assert share_problem(session, shares, limits, 4096, 512) is None
    assert share_problem(session, shares, limits, 4096, 512 + 1792) is None
    problem = share_problem(session, shares, limits, 4096, 512 + 1793)
    assert problem is not None
    assert "session_share_bytes" in problem
    assert share_problem(session, shares, LIMITS, 4096, 1 << 20) is None
