"""What the client raises, by whose fault it is.

Every exception that this package raises on purpose is a StormError, but for one: the RuntimeError
for a tensor that was changed in place is PyTorch's own and reads like it.
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
    """Base of everything the client raises."""


class UsageError(StormError):
    """The caller passed a bad value, or used an object in a state that does not allow it."""


class DaemonUnavailable(StormError):
    """No daemon answers at the address, or it takes no session. Nothing has been stored."""


class DaemonLost(StormError):
    """The daemon, or the session with it, ended. What it held for this process is gone."""


class ConnectionClosed(DaemonLost):
    """The session was ended from this side: the client is closed."""


class ActivationLost(StormError):
    """The bytes of a saved tensor cannot be had again; the backward pass cannot go on."""


class CorruptBlob(StormError):
    """The bytes of a saved tensor failed their checksum; they were not returned."""


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
    """Return the error that the daemon named on the wire; a name from later versions is kept."""
    error = _BY_NAME.get(kind)
    return error(detail) if error is not None else StormError(f"{kind}: {detail}")


def lost_in_forward(loss: DaemonLost) -> DaemonLost:
    """Return a loss that keeps something from being saved, with what to do next."""
    return _advised(
        loss,
        "call storm_client.connect() again when there is a daemon (`stormd serve`); with its "
        'on_daemon_loss="keep" training goes on without one until one answers',
    )


def lost_in_backward(loss: DaemonLost, *, keeps: bool) -> DaemonLost:
    """Return a loss of what was saved, with what to do next; `keeps` as connect was told."""
    if keeps:
        return _advised(loss, "repeat the step from its forward pass")
    return _advised(
        loss,
        "repeat the step from its forward pass with a client from storm_client.connect(); with "
        'on_daemon_loss="keep" the same client can do that, without a daemon too',
    )


def _advised(loss: DaemonLost, advice: str) -> DaemonLost:
    return loss if isinstance(loss, ConnectionClosed) else DaemonLost(f"{loss}; {advice}")
