"""The sessions' clients: found by session, by connection while they are heard, by token once."""

from __future__ import annotations

from typing import cast

from stormd.gateway.peers import Peer, Peers
from stormd.lanes import Lane
from stormd.ledger.sessions import Session, SessionInfo
from stormd.protocol import Envelope, Ping
from stormd.transport.control import Connection
from stormd.transport.listener import Credentials


def peer(session: int) -> Peer:
    token = bytes([session]) * 16
    credentials = Credentials(uid=1000 + session, gid=100, pid=1)
    info = SessionInfo(session=session, device="cpu", uid=credentials.uid, pid=1, name="x")
    return Peer(
        record=Session(info=info, part_bytes=1, seen=0.0, segments={}),
        connection=cast("Connection", object()),
        credentials=credentials,
        lane=cast("Lane", None),
        token=token,
        descriptors=(),
    )


def test_a_token_and_its_user_claim_a_client_once() -> None:
    peers = Peers()
    first, second = peer(1), peer(2)
    peers.add(first)
    peers.add(second)
    assert peers.claim(second.token, first.credentials.uid) is None
    assert peers.claim(b"x" * 16, second.credentials.uid) is None
    assert peers.claim(second.token, second.credentials.uid) is second
    assert peers.claim(second.token, second.credentials.uid) is None


def test_who_is_cut_off_is_not_heard_but_still_known() -> None:
    peers = Peers()
    one = peer(1)
    peers.add(one)
    one.outbox.append(Envelope(0, Ping()))
    assert peers.by_connection[one.connection] is one
    assert one.is_heard
    peers.cut_off(one)
    assert one.connection not in peers.by_connection
    assert not one.is_heard
    assert peers.claim(one.token, one.credentials.uid) is None
    assert one.outbox == []
    assert peers.by_session[1] is one
    assert list(peers) == [one]
    peers.remove(1)
    assert list(peers) == []
