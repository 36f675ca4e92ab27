"""The HTTP endpoint an operator's tools read: a few fixed GET routes.

Routes are called on the daemon's event loop, so they read a consistent state without a lock. A
slow, silent or hostile client costs one bounded connection for a few seconds and nothing else.

Why not prometheus-client's own server: it answers on an unlimited number of threads, one per
connection, which would read the ledger while the loop changes it. Here, a loop that hangs also
stops answering, and a health probe is meant to detect that.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from stormd.errors import AddressInUse, error_with_remedy
from stormd.options import parse_host_port

__all__ = ["Endpoint", "Reply", "Route"]

_LOGGER: Final = logging.getLogger("stormd.endpoint")

_MAX_REQUEST_BYTES: Final = 8192
_MAX_CONNECTIONS: Final = 16
"""One more connection closes the oldest. A probe sends its request at once, so silent clients
cannot keep it out."""

_REQUEST_SECONDS: Final = 5.0
"""The most time from accepting a connection to having sent the answer."""

_REMEDIES: Final = {
    errno.EADDRINUSE: "stop what uses it, or set another port",
    errno.EADDRNOTAVAIL: "set an address that this host has, as 127.0.0.1",
    errno.EACCES: "set a port above 1023",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a route."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Route = Callable[[str], Reply]
"""Takes the request's Accept header, empty if there is none."""


class Endpoint:
    """Serves `routes` (path to Route) by GET and HEAD on a TCP address; one request per connection.

    `address` is HOST:PORT, an IPv6 host in brackets; port 0 takes any free one. Nothing is bound
    before open(). close() ends the connections in flight and may be called twice.
    """

    def __init__(self, address: str, routes: Mapping[str, Route]) -> None:
        self._host, self._port = parse_host_port(address)
        self._routes = dict(routes)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def open(self) -> None:
        """Start to listen and answer.

        Raises:
            AddressInUse: the address is taken, or is not one of this machine's. Nothing is bound.
        """
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self._port, limit=_MAX_REQUEST_BYTES
            )
        except OSError as error:
            advice = _REMEDIES.get(error.errno or 0, "set another")
            raise AddressInUse(
                f"metrics_address {self._host}:{self._port} cannot be listened on: "
                f"{error_with_remedy(error, advice)}"
            ) from error

    @property
    def port(self) -> int:
        """The port in use; 0 before open() and after close()."""
        if self._server is None:
            return 0
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop answering; return once every connection has ended."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for writer in self._connections.values():
            writer.transport.abort()  # ends its handler as if the client had left
        await asyncio.gather(*self._connections)
        await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        if len(self._connections) > _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            self._connections.pop(oldest).transport.abort()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await self._serve_request(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            # The client's fault: it is silent, slow or gone, and cannot be sent an error.
            _LOGGER.debug("request not completed")
        finally:
            self._connections.pop(task, None)
            writer.close()

    async def _serve_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            reply, with_body = _problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), True
        else:
            reply, with_body = self._answer(head.decode("latin-1"))
        writer.write(_encoded(reply, with_body=with_body))
        await writer.drain()

    def _answer(self, head: str) -> tuple[Reply, bool]:
        """Return the reply to a request's head, and whether to send the reply's body."""
        line, _, fields = head.partition("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _problem(HTTPStatus.BAD_REQUEST), True
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _problem(HTTPStatus.METHOD_NOT_ALLOWED), True
        route = self._routes.get(target.partition("?")[0])
        if route is None:
            return _problem(HTTPStatus.NOT_FOUND), method == "GET"
        return _called(route, _header(fields, "accept")), method == "GET"


def _called(route: Route, accept: str) -> Reply:
    try:
        return route(accept)
    except Exception:  # a fault in a report must not end the daemon's loop
        _LOGGER.exception("route failed")
        return _problem(HTTPStatus.INTERNAL_SERVER_ERROR)


def _header(fields: str, name: str) -> str:
    for line in fields.split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == name:
            return value.strip()
    return ""


def _problem(status: HTTPStatus) -> Reply:
    return Reply(f"{status.value} {status.phrase}\n".encode(), status=status)


def _encoded(reply: Reply, *, with_body: bool) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if reply.status == HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\n"
        f"Content-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n"
        f"{allow}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (reply.body if with_body else b"")
