"""The HTTP endpoint over real sockets, with clients that behave and clients that do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest
from support.waiting import wait_until

from stormd import endpoint as module
from stormd.endpoint import Endpoint, Reply
from stormd.errors import AddressInUse

SECONDS = 60.0


def fails(accept: str) -> Reply:
    raise ZeroDivisionError(accept)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    routes = {
        "/hello": lambda accept: Reply(f"hello {accept}".encode()),
        "/ill": lambda accept: Reply(b"no", status=HTTPStatus.SERVICE_UNAVAILABLE),
        "/fails": fails,
    }
    server = Endpoint("127.0.0.1:0", routes)
    await server.open()
    yield server
    await server.close()


async def ask(endpoint: Endpoint, request: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes."""
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    return answer


async def get(endpoint: Endpoint, path: str, method: str = "GET") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nACCEPT: text/x\r\n\r\n"
    return await ask(endpoint, head.encode())


async def test_answers_a_route_with_its_length(endpoint: Endpoint) -> None:
    answer = await get(endpoint, "/hello?x=1")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Length: 12" in head
    assert body == b"hello text/x"
    assert await get(endpoint, "/hello?x=1", "HEAD") == head + b"\r\n\r\n"


async def test_says_what_is_wrong(endpoint: Endpoint) -> None:
    for path, method, status in (
        ("/ill", "GET", b"503"),
        ("/fails", "GET", b"500"),
        ("/nowhere", "GET", b"404"),
        ("/hello", "POST", b"405"),
    ):
        assert (await get(endpoint, path, method)).split(b" ")[1] == status
    for head in (b"\r\n\r\n", b"GET /\r\n\r\n", b"\xff\x00 x y\r\n\r\n"):
        assert (await ask(endpoint, head)).split(b" ")[1] == b"400"


async def test_refuses_an_endless_head(endpoint: Endpoint) -> None:
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * 9000)
        assert (await reader.readline()).split(b" ")[1] == b"431"
        writer.close()


async def test_a_silent_client_is_let_go(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as short:
        short.setattr(module, "_REQUEST_SECONDS", 0.01)
        with contextlib.suppress(ConnectionResetError):  # for one that spoke too late
            assert await ask(endpoint, b"GET /hello") == b""
    assert (await get(endpoint, "/hello")).startswith(b"HTTP/1.1 200")


async def test_silent_connections_are_limited_and_keep_nobody_out(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 60.0)  # none of them ends for its silence
    silent = [await asyncio.open_connection("127.0.0.1", endpoint.port) for _ in range(5)]
    async with asyncio.timeout(SECONDS):
        for reader, _ in silent[:3]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        assert (await get(endpoint, "/hello")).startswith(b"HTTP/1.1 200")
    for _, writer in silent:
        writer.close()


@pytest.mark.parametrize(
    ("host", "advice"),
    [("127.0.0.1", "stop what uses it"), ("192.0.2.1", "set an address that this host has")],
)
async def test_an_address_that_cannot_be_had_is_refused_with_its_own_advice(
    endpoint: Endpoint, host: str, advice: str
) -> None:
    """The second is in a network for documentation, which no host is in."""
    with pytest.raises(AddressInUse, match=f"{host}:{endpoint.port} cannot .*: {advice}"):
        await Endpoint(f"{host}:{endpoint.port}", {}).open()


async def test_close_ends_what_is_under_way() -> None:
    server = Endpoint("127.0.0.1:0", {})
    await server.open()
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /")
        await asyncio.to_thread(wait_until, lambda: bool(server._connections))
        await server.close()
        await server.close()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert server.port == 0
