"""Places of sessions: how many each user has, and which are longest without a lifeline."""

from __future__ import annotations

from stormd.ledger.leases import Places
from stormd.ledger.sessions import Session, SessionInfo


def session(number: int, uid: int = 0, device: str = "cpu") -> Session:
    info = SessionInfo(session=number, device=device, uid=uid, pid=1, name="x")
    return Session(info=info, chunk_bytes=1, seen=0.0, segments={})


def test_the_stalest_is_of_the_user_who_has_most_of_them() -> None:
    places = Places()
    assert places.stalest(has_lane=True) is None
    modest, first, second, third = session(1, 5), session(2, 6), session(3, 6), session(4, 6)
    for record in (modest, first, second, third):
        places.take(record)
    places.attached(first)
    assert places.stalest(has_lane=True) is second
    assert places.stalest(has_lane=True, uid=5) is modest
    assert places.stalest(has_lane=True, uid=8) is None
    assert places.stalest(has_lane=False) is None
