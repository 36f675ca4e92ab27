"""The exceptions of the client, one class per cause.

Every exception that this package raises on purpose is a StormError, with one exception: modifying a
saved tensor in place raises a RuntimeError with PyTorch's own message.
"""

from __future__ import annotations

__all__ = [
    "ActivationLost",
    "ConnectionClosed",
    "CorruptBlob",
    "DaemonLost",
    "DaemonUnavailable",
    "ProtocolMismatch",
    "QuotaExceeded",
    "StormError",
    "UsageError",
    "lost_in_backward",
    "lost_in_forward",
    "named",
]


class StormError(Exception):
    """Base class of the client's exceptions."""


class UsageError(StormError):
    """The caller passed a bad value, or used an object in a state that does not allow it."""


class DaemonUnavailable(StormError):
    """No daemon answers at the address, or it accepts no session. Nothing has been stored."""


class DaemonLost(StormError):
    """The daemon or its session ended. The data that it held for this process is lost."""

    _is_advised = False
    """Whether its text says what to do, which is said once."""


class ConnectionClosed(DaemonLost):
    """The session was ended by this process: the client is closed."""


class ActivationLost(StormError):
    """The bytes of a saved tensor cannot be restored; the backward pass cannot continue."""


class CorruptBlob(StormError):
    """The bytes of a saved tensor failed their checksum, and are not returned."""


class ProtocolMismatch(StormError):
    """Client and daemon speak different versions of the protocol."""


class QuotaExceeded(StormError):
    """The daemon refused the request because a limit of the session or its user is reached."""


_BY_NAME = {
    kind.__name__: kind
    for kind in (
        UsageError,
        DaemonUnavailable,
        DaemonLost,
        ActivationLost,
        CorruptBlob,
        ProtocolMismatch,
        QuotaExceeded,
    )
}


def named(kind: str, detail: str) -> StormError:
    """Return the error that the daemon named on the wire; unknown names become a StormError."""
    error = _BY_NAME.get(kind)
    return error(detail) if error is not None else StormError(f"{kind}: {detail}")


def lost_in_forward(loss: DaemonLost) -> DaemonLost:
    """Return `loss` with advice, for a tensor that cannot be saved."""
    return _advised(
        loss,
        "call storm_client.connect() again when there is a daemon (`stormd serve`); with its "
        'on_daemon_loss="keep" training goes on without one until one answers',
    )


def lost_in_backward(loss: DaemonLost, *, keeps: bool) -> DaemonLost:
    """Return `loss` with advice, for a saved tensor; `keeps`: on_daemon_loss is "keep"."""
    if keeps:
        return _advised(loss, "repeat the step from its forward pass")
    return _advised(
        loss,
        "repeat the step from its forward pass with a client from storm_client.connect(); with "
        'on_daemon_loss="keep" the same client can do that, without a daemon too',
    )


def _advised(loss: DaemonLost, advice: str) -> DaemonLost:
    if isinstance(loss, ConnectionClosed) or loss._is_advised:
        return loss
    advised = DaemonLost(f"{loss}; {advice}")
    advised._is_advised = True
    return advised
