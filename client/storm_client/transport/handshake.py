"""Opens a session: checks for a listener, exchanges Hello for Welcome, connects the lifeline.

Every Channel belongs to a session that a daemon of our version has granted. If that fails, nothing
stays open, and the error says what to do.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from storm_client.errors import (
    DaemonLost,
    DaemonUnavailable,
    ProtocolMismatch,
    UsageError,
    named,
)
from storm_client.lanes import LaneHello
from storm_client.transport.lifeline import Gone, Lifeline, NoAnswer
from stormd.protocol import (
    PROTOCOL_VERSION,
    Envelope,
    Hello,
    Message,
    ProtocolError,
    Refused,
    Resume,
    Welcome,
    accepts_connections,
    decode,
    encode,
    parse_address,
    socket_trouble,
)
from stormd.protocol.dealer import Dealer

__all__ = [
    "FIRST_NUMBER",
    "Channel",
    "is_listening",
    "open_channel",
    "resumed_channel",
    "socket_path",
]

HELLO_NUMBER = 1
"""The request number of Hello."""

FIRST_NUMBER = HELLO_NUMBER + 1
"""The first number that is free for requests, entries and tickets."""


@dataclass(frozen=True, slots=True)
class Channel:
    """The two sockets of an open session, and the descriptors that the daemon has sent."""

    dealer: Dealer
    lifeline: Lifeline
    descriptors: list[int]
    """For the session's lane; the caller closes them."""
    welcome: Welcome

    def close(self) -> None:
        """End the session on this side."""
        self.lifeline.close()
        self.dealer.close()


def socket_path(address: str) -> Path:
    """Return the path of an address.

    Raises:
        UsageError: the address is not of the form `ipc:///PATH`.
    """
    try:
        return parse_address(address)
    except ProtocolError as error:
        raise UsageError(f"{error}; pass address='ipc:///PATH' or set STORMD_ADDRESS") from error


def is_listening(address: str) -> bool:
    """Return whether somebody accepts connections at the address, without sending anything."""
    return accepts_connections(socket_path(address))


def open_channel(address: str, lane: LaneHello, timeout: float) -> Channel:
    """Open a session for `lane` at `address`; wait `timeout` seconds for each answer.

    Raises:
        UsageError: a malformed address, or a lane that the daemon does not have.
        DaemonUnavailable: nobody answers there, or the daemon accepts no session.
        ProtocolMismatch: the daemon speaks another version.
    """
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        features=list(lane.features),
        pid=os.getpid(),
        uid=os.getuid(),
        device=lane.device,
        device_uuid=lane.device_uuid,
        staging_bytes=lane.staging_bytes,
        name=_process_name(),
    )
    _check_listening(address)
    dealer = _connect(address, timeout)
    try:
        welcome = _introduce(dealer, address, hello, timeout)
        lifeline, descriptors = Lifeline.attach(welcome.lifeline, welcome.token, timeout)
    except BaseException:
        dealer.close()
        raise
    return Channel(dealer, lifeline, descriptors, welcome)


def resumed_channel(
    address: str,
    welcome: Welcome,
    shared: Sequence[int],
    timeout: float,
    is_over: Callable[[], bool],
) -> Channel:
    """Resume the session of `welcome`, whose daemon has ended, with the daemon at `address`.

    `shared` are the session's descriptors. The lifeline is connected first: if this daemon ends
    before it answers, the lifeline tells at once.

    A daemon that has the lifeline has the session: to close the lifeline would end it for good. So
    that daemon gets as long as Welcome said, or until `is_over` says that nobody waits.

    Raises:
        Gone: the new daemon has ended meanwhile.
        NoAnswer: nobody has answered within `timeout` seconds; another attempt may succeed.
        DaemonUnavailable: nobody listens there, or the daemon does not know the session.
        ProtocolMismatch: the daemon speaks another version.
    """
    resume = Resume(
        protocol=PROTOCOL_VERSION,
        epoch=welcome.epoch,
        session=welcome.session,
        secret=welcome.secret,
        pid=os.getpid(),
        uid=os.getuid(),
    )
    _check_listening(address)
    lifeline = Lifeline.connect(welcome.lifeline, timeout)
    dealer: Dealer | None = None
    try:
        dealer = _connect(address, timeout)
        fresh = _introduce(dealer, address, resume, timeout, lifeline)
        descriptors = lifeline.open(fresh.token, welcome.resume_seconds, shared, is_over)
        return Channel(dealer, lifeline, descriptors, fresh)
    except BaseException:
        lifeline.close()
        if dealer is not None:
            dealer.close()
        raise


def _check_listening(address: str) -> None:
    trouble = socket_trouble(socket_path(address))
    if trouble is None:
        return
    advice = f"{trouble.advice}, or name no address to get a daemon of your own"
    if trouble.denies:
        raise DaemonUnavailable(
            f"the daemon at {address} is not for this user: {trouble}; {advice}"
        )
    raise DaemonUnavailable(f"no daemon listens at {address} ({trouble}); {advice}")


def _connect(address: str, timeout: float) -> Dealer:
    """Connect once: after a reconnect, messages in flight would belong to a stranger's session."""
    try:
        return Dealer(socket_path(address), timeout)
    except OSError as error:
        raise NoAnswer(
            f"whoever listens at {address} did not accept a connection within {timeout:g} s "
            f"({error}); see `stormd status`"
        ) from error


def _introduce(
    dealer: Dealer,
    address: str,
    first: Hello | Resume,
    timeout: float,
    lifeline: Lifeline | None = None,
) -> Welcome:
    """Send a Hello or Resume and return the Welcome, unless the end of `lifeline` comes first.

    Raises:
        Gone: the daemon ended before that.
    """
    dealer.send(encode([Envelope(HELLO_NUMBER, first)]))
    poller, deadline = select.poll(), time.monotonic() + timeout
    poller.register(dealer, select.POLLIN)
    if lifeline is not None:
        poller.register(lifeline, select.POLLIN)
    while not dealer.is_ended and (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(left * 1000))
        if ready and dealer.fileno() not in ready:
            raise Gone("the daemon ended before it had answered")
        try:
            frames, dealer.unread = dealer.received()
            if frames:
                return _welcomed(decode(frames[0])[0].message, address)
        except ProtocolError as error:
            raise ProtocolMismatch(
                f"the daemon at {address} answered Hello in a way that version "
                f"{PROTOCOL_VERSION} does not know ({error}); install the daemon's version"
            ) from error
    if dealer.is_ended:
        raise (NoAnswer if lifeline is None else Gone)(
            f"whoever listens at {address} closed the connection; check that it is stormd "
            "(`stormd status`), and see its log"
        )
    raise NoAnswer(
        f"whoever listens at {address} did not answer within {timeout:g} s; "
        "check that it is stormd (`stormd status`), or raise timeout"
    )


def _welcomed(answer: Message, address: str) -> Welcome:
    if isinstance(answer, Refused):
        refusal = named(answer.kind, answer.detail)
        # A daemon that is ending refuses with DaemonLost; without a session it is unavailable.
        raise DaemonUnavailable(answer.detail) if isinstance(refusal, DaemonLost) else refusal
    if not isinstance(answer, Welcome):
        raise ProtocolMismatch(f"{address} answered Hello by {type(answer).__name__}")
    return answer


def _process_name() -> str:
    """Return the process's name, for `stormd status`."""
    return Path("/proc/self/comm").read_text(encoding="utf-8", errors="replace").strip()
