"""A client of the wire protocol alone, to drive a daemon without the client library.

It is synchronous, checks nothing, and can say whatever a test wants said.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zmq

from stormd.protocol import (
    PROTOCOL_VERSION,
    STORED_FIELDS,
    Admitted,
    Envelope,
    Hello,
    Message,
    Release,
    Restore,
    Restored,
    Store,
    Stored,
    StoredParts,
    Welcome,
    decode,
    encode,
    unpack,
)

TIMEOUT_SECONDS = 60.0


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """Its destructor would wait for ever for the sockets of a test that has failed."""

    __del__ = object  # type: ignore[assignment]  # called without arguments


class RawClient:
    """One connection; `open` makes it a session with `staging` mapped."""

    def __init__(self, address: str, **options: int | bytes) -> None:
        """Connect, with these ZeroMQ options set (`RCVHWM=1`)."""
        self._context = _Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)
        self.received: list[Envelope] = []
        self.welcome: Welcome | None = None
        self.line: socket.socket | None = None
        self.reason = ""
        self.staging: mmap.mmap | None = None
        self.page: mmap.mmap | None = None
        self._requests = 0
        self._entries = 0
        self._stores: dict[int, int] = {}
        """By entry, the requests that have not been answered."""

    # --- words ------------------------------------------------------------------------------

    def send(self, *messages: Message) -> list[int]:
        """Send a batch; return the messages' request numbers."""
        batch = []
        for message in messages:
            self._requests += 1
            batch.append(Envelope(self._requests, message))
            if isinstance(message, Store):
                self._stores[message.entry] = self._requests
        self.socket.send(encode(batch))
        return [request for request, _ in batch]

    def send_bytes(self, frame: bytes) -> None:
        self.socket.send(frame)

    def wait(
        self, wanted: Callable[[Envelope], bool], timeout: float = TIMEOUT_SECONDS
    ) -> Envelope:
        """Return and remove the first message that is wanted; the others stay in `received`."""
        deadline = time.monotonic() + timeout
        while True:
            for index, envelope in enumerate(self.received):
                if wanted(envelope):
                    return self.received.pop(index)
            left = deadline - time.monotonic()
            if left < 0 or not self.socket.poll(int(left * 1000)):
                raise TimeoutError(f"no such answer in {timeout} s; got {self.received}")
            self.received += self._expanded(decode(self.socket.recv()))

    def _expanded(self, answers: Sequence[Envelope]) -> Iterator[Envelope]:
        """Yield answers as if nothing had been joined or left out."""
        for request, message in answers:
            if isinstance(message, Admitted):
                self._stores.pop(message.entry, None)
            stored = [message] if isinstance(message, Stored) else []
            if isinstance(message, StoredParts):
                places = unpack(message.places, STORED_FIELDS)
                stored = [Stored(entry, nbytes, message.mode) for entry, nbytes in places]
            for one in stored:
                asked = self._stores.pop(one.entry, None)
                if asked is not None:
                    yield Envelope(asked, Admitted(one.entry))
                yield Envelope(0, one)
            if not stored:
                yield Envelope(request, message)

    def wait_for(self, kind: type[Message], timeout: float = TIMEOUT_SECONDS, **fields: Any) -> Any:
        """Return the first message of that type and with those field values."""

        def wanted(envelope: Envelope) -> bool:
            return isinstance(envelope.message, kind) and all(
                getattr(envelope.message, name) == value for name, value in fields.items()
            )

        return self.wait(wanted, timeout).message

    def ask(self, message: Message) -> Any:
        """Send a message and return its answer."""
        (request,) = self.send(message)
        return self.wait(lambda envelope: envelope.request == request).message

    # --- a session --------------------------------------------------------------------------

    def hello(self, **changes: Any) -> Any:
        """Send Hello and return its answer."""
        fields: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "features": [],
            "pid": os.getpid(),
            "uid": os.getuid(),
            "device": "cpu",
            "device_uuid": "",
            "staging_bytes": 0,
            "name": "raw",
        }
        return self.ask(Hello(**{**fields, **changes}))

    def connect_lifeline(self, path: str, token: bytes) -> list[int]:
        """Connect the lifeline and return the descriptors; an empty list where it was closed."""
        self.line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.line.settimeout(TIMEOUT_SECONDS)
        self.line.connect(path)
        self.line.sendall(token)
        data, descriptors, _, _ = socket.recv_fds(self.line, 1, 4)
        assert len(descriptors) == (data[0] if data else 0)
        return descriptors

    def open(self, **changes: Any) -> RawClient:
        """Open a session."""
        self.welcome = self.hello(**changes)
        assert isinstance(self.welcome, Welcome), self.welcome
        page, staging = self.connect_lifeline(self.welcome.lifeline, self.welcome.token)
        self.page = mmap.mmap(page, 4096)
        self.staging = mmap.mmap(staging, self.welcome.staging_bytes)
        os.close(page)
        os.close(staging)
        return self

    def store(self, data: bytes, *, offset: int = 0, codec: str = "raw", **changes: Any) -> int:
        """Copy data to staging and send Store, without waiting; return the entry's id."""
        self.staging[offset : offset + len(data)] = data
        self._entries += 1
        fields = {
            "entry": self._entries,
            "segment": 0,
            "offset": offset,
            "nbytes": len(data),
            "dtype": "uint8",
            "codec": codec,
            "sequence": 0,
        }
        self.send(Store(**{**fields, **changes}))
        return self._entries

    def stored(self, data: bytes, **options: Any) -> int:
        """Store data and wait until it is stored."""
        entry = self.store(data, **options)
        self.wait_for(Stored, entry=entry)
        return entry

    def restored(self, entry: int, nbytes: int, *, offset: int = 0, ticket: int = 1) -> bytes:
        """Restore an entry and return its bytes."""
        self.send(
            Restore(ticket=ticket, entry=entry, segment=0, offset=offset, nbytes=nbytes, sequence=0)
        )
        self.wait_for(Restored, ticket=ticket)
        return self.staging[offset : offset + nbytes]

    def release(self, *entries: int) -> None:
        self.send(Release(list(entries)))

    def is_cut_off(self, timeout: float = TIMEOUT_SECONDS) -> bool:
        """Whether the daemon closes the lifeline within the time, for `reason` if it says one."""
        self.line.settimeout(timeout)
        try:
            while said := self.line.recv(256):
                self.reason += said.decode()
        except TimeoutError:
            return False
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        """Vanish without a word."""
        if self.line is not None:
            self.line.close()
        for mapping in (self.page, self.staging):
            if mapping is not None:
                mapping.close()
        self.socket.close()
        self._context.term()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
