"""Asking a daemon for its state, against sockets that answer in every way a daemon might."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from stormd.errors import NoDaemon
from stormd.protocol import Envelope, ProtocolError, Refused, Status, decode, encode
from stormd.query import StatusQuery, find_address

SECONDS = 60.0
REFUSAL = Refused("UsageError", "uid 7 may not connect")

Answer = Callable[[int], list[bytes]]
"""Given the request's number, the frames to answer with."""


@contextmanager
def _answering(address: str, answer: Answer) -> Iterator[None]:
    """A ROUTER that answers one question after the other, until the block is left."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(address)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if router.poll(20):
                route, frame = router.recv_multipart()
                for reply in answer(decode(frame)[0].request):
                    router.send_multipart([route, reply])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        router.close()
        context.term()


@contextmanager
def _listening(path: Path) -> Iterator[None]:
    """Somebody at a socket; its file stays, as a killed daemon's does."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'd.sock'}"


def _status(request: int, number: int) -> bytes:
    return encode([Envelope(request, Status({"number": number}))])


def test_returns_the_state_again_and_again_and_passes_over_other_answers(address: str) -> None:
    with (
        _answering(address, lambda one: [_status(one + 9, 0), _status(one, one)]),
        StatusQuery(address, timeout=SECONDS) as query,
    ):
        assert [query.ask()["number"] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "timeout", "said"),
    [
        (lambda _request: [], 0.1, r"within 0.1 s"),
        (lambda request: [encode([Envelope(request, REFUSAL)])], SECONDS, "uid 7 may not connect"),
        (lambda _request: [b"HTTP/1.1 400"], SECONDS, "another protocol"),
    ],
    ids=["silence", "refusal", "another protocol"],
)
def test_what_is_no_state_is_told(address: str, answer: Answer, timeout: float, said: str) -> None:
    with (
        _answering(address, answer),
        StatusQuery(address, timeout=timeout) as query,
        pytest.raises(NoDaemon, match=said),
    ):
        query.ask()


def test_no_socket_is_told_at_once(address: str) -> None:
    message = f"does not exist.: start one with `stormd serve --address {address}`"
    with StatusQuery(address) as query, pytest.raises(NoDaemon, match=message):
        query.ask()


def test_find_address_prefers_what_is_named(tmp_path: Path) -> None:
    environ = {"STORMD_ADDRESS": "ipc:///env.sock"}
    assert find_address("ipc:///given.sock", environ) == "ipc:///given.sock"
    assert find_address(None, environ) == "ipc:///env.sock"
    with pytest.raises(ProtocolError, match="ipc:///PATH"):
        find_address("tcp://x", environ)


def test_find_address_takes_the_socket_that_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stormd.protocol.addresses.SYSTEM_DIRECTORY", tmp_path / "none")
    path = tmp_path / "stormd" / "stormd.sock"
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(NoDaemon, match="stormd serve"):
        find_address(None, environ)
    path.parent.mkdir()
    with _listening(path):
        assert find_address(None, environ) == f"ipc://{path}"
    with pytest.raises(NoDaemon, match="refuses connections: the process that made it has ended"):
        find_address(None, environ)
