"""Every message of the control plane, one frozen dataclass each.

What stays true: a message object that exists is valid. Construction checks types and ranges,
so neither side repeats a check, and decoding a hostile frame ends in ProtocolError before any
field is used. Fields travel by position; a field is only ever added together with a new
PROTOCOL_VERSION.

Client to daemon: Hello first, then MapSegment / UnmapSegment, Store, Restore, Release, Ping,
StatusRequest, Goodbye. Daemon to client: Welcome, Mapped, Admitted / Rejected, Stored,
Restored, Failed, Pong, Status, Refused.

One storage of the client travels as one or more entries. The way of an entry:
    Store  ->  Admitted   the pool has promised the room: the entry will not be lost to a limit
           ->  Stored     its bytes are encoded: the staging range may be used again
           or  Rejected   the entry does not exist: the tensor stays with the client
    Restore -> Restored   the destination range holds the verified bytes
           or  Failed     the bytes cannot be had (CorruptBlob, a lane's error)
    Release -> (no answer) the entry is gone as soon as nothing uses it
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from stormd.protocol.errors import ProtocolError
from stormd.protocol.limits import MAX_BATCH, MAX_ENTRY_BYTES, MAX_HANDLE_BYTES, MAX_ID, MAX_TEXT

__all__ = [
    "CODECS",
    "DEVICES",
    "REJECTIONS",
    "Admitted",
    "Failed",
    "Goodbye",
    "Hello",
    "MapSegment",
    "Mapped",
    "Message",
    "Ping",
    "Pong",
    "Refused",
    "Rejected",
    "Release",
    "Restore",
    "Restored",
    "Status",
    "StatusRequest",
    "Store",
    "Stored",
    "UnmapSegment",
    "Welcome",
    "message_types",
]

DEVICES = ("cpu", "cuda")
CODECS = ("ancf", "raw")
REJECTIONS = ("pool_full", "quota", "too_many_entries", "draining", "invalid")
"""Why a Store is answered by Rejected."""


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; OP is the number on the wire."""

    OP: ClassVar[int] = 0

    def to_wire(self) -> tuple[Any, ...]:
        """Return the fields in the order they travel."""
        return tuple(getattr(self, name) for name in _field_names(type(self)))


# --- from the client ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Asks for a session. The first message of a connection; anything else before it is refused.

    `device_uuid` is the CUDA device's UUID as text, empty on the cpu lane. `ipc_modes` names the
    ways in which the client can export device memory ("cuda_ipc"). `staging_bytes` is the size
    of staging area that the client would like; Welcome says what it got.
    """

    OP: ClassVar[int] = 1
    protocol: int
    features: list[str]
    pid: int
    uid: int
    device: str
    device_uuid: str
    ipc_modes: list[str]
    staging_bytes: int
    name: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Hello.protocol", self.protocol)
        _texts("Hello.features", self.features)
        _id("Hello.pid", self.pid)
        _id("Hello.uid", self.uid)
        _one_of("Hello.device", self.device, DEVICES)
        _text("Hello.device_uuid", self.device_uuid)
        _texts("Hello.ipc_modes", self.ipc_modes)
        _id("Hello.staging_bytes", self.staging_bytes)
        _text("Hello.name", self.name)


@dataclass(frozen=True, slots=True)
class MapSegment(Message):
    """Offers an allocation of the client as segment `segment` of its session (cuda lane).

    `handle` is the CUDA IPC handle, `buffer_id` the allocation's CU_POINTER_ATTRIBUTE_BUFFER_ID,
    `nbytes` its size. Answered by Mapped or Refused. Segment 0 is the staging area: on the cpu
    lane it exists from Welcome on and is never mapped by message.
    """

    OP: ClassVar[int] = 2
    segment: int
    handle: bytes
    buffer_id: int
    nbytes: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("MapSegment.segment", self.segment)
        _blob("MapSegment.handle", self.handle)
        _id("MapSegment.buffer_id", self.buffer_id)
        _id("MapSegment.nbytes", self.nbytes)


@dataclass(frozen=True, slots=True)
class UnmapSegment(Message):
    """Takes a segment back. No answer; the daemon unmaps it once nothing under way uses it."""

    OP: ClassVar[int] = 3
    segment: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("UnmapSegment.segment", self.segment)


@dataclass(frozen=True, slots=True)
class Store(Message):
    """Asks to store `nbytes` at `offset` of `segment` as entry `entry`.

    `entry` is chosen by the client, larger than every one before it in the session. `dtype` is a
    name of storm_kernels' dtypes ("bfloat16", "uint8", ...), a hint for the codec. `sequence` is
    the value of the session's `published` timeline that says the bytes are there (cuda lane; 0
    on the cpu lane, where they are there when the message is sent).
    """

    OP: ClassVar[int] = 4
    entry: int
    segment: int
    offset: int
    nbytes: int
    dtype: str
    codec: str
    sequence: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Store.entry", self.entry)
        _id("Store.segment", self.segment)
        _id("Store.offset", self.offset)
        _size("Store.nbytes", self.nbytes)
        _text("Store.dtype", self.dtype)
        _one_of("Store.codec", self.codec, CODECS)
        _id("Store.sequence", self.sequence)


@dataclass(frozen=True, slots=True)
class Restore(Message):
    """Asks for the bytes of `entry` at `offset` of `segment`; `ticket` names this request.

    `sequence` is the value of `published` from which on the destination may be written (cuda).
    """

    OP: ClassVar[int] = 5
    ticket: int
    entry: int
    segment: int
    offset: int
    nbytes: int
    sequence: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Restore.ticket", self.ticket)
        _id("Restore.entry", self.entry)
        _id("Restore.segment", self.segment)
        _id("Restore.offset", self.offset)
        _size("Restore.nbytes", self.nbytes)
        _id("Restore.sequence", self.sequence)


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Gives entries up. Ids that do not exist (rejected stores) are passed over."""

    OP: ClassVar[int] = 6
    entries: list[int]

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _ids("Release.entries", self.entries)


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """A heartbeat; renews the session's lease. Answered by Pong."""

    OP: ClassVar[int] = 7


@dataclass(frozen=True, slots=True)
class StatusRequest(Message):
    """Asks for the daemon's state; allowed without a session. Answered by Status."""

    OP: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """Ends the session in order. Answered by closing the lifeline once all is freed."""

    OP: ClassVar[int] = 9


# --- from the daemon ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Grants a session.

    The client now connects to the stream socket at `lifeline`, sends `token`, and receives file
    descriptors over it: the timeline page, and on the cpu lane the staging area of
    `staging_bytes`. The session lives as long as that connection. `part_bytes` is the largest
    entry this lane takes; `lease_seconds` how long the session outlives its last message.
    """

    OP: ClassVar[int] = 64
    session: int
    token: bytes
    protocol: int
    features: list[str]
    version: str
    lifeline: str
    staging_bytes: int
    part_bytes: int
    lease_seconds: float

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Welcome.session", self.session)
        _blob("Welcome.token", self.token)
        _id("Welcome.protocol", self.protocol)
        _texts("Welcome.features", self.features)
        _text("Welcome.version", self.version)
        _text("Welcome.lifeline", self.lifeline)
        _id("Welcome.staging_bytes", self.staging_bytes)
        _size("Welcome.part_bytes", self.part_bytes)
        _seconds("Welcome.lease_seconds", self.lease_seconds)


@dataclass(frozen=True, slots=True)
class Mapped(Message):
    """The segment is mapped and may be named in Store and Restore."""

    OP: ClassVar[int] = 65
    segment: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Mapped.segment", self.segment)


@dataclass(frozen=True, slots=True)
class Admitted(Message):
    """The pool has promised room for the entry: it will be stored."""

    OP: ClassVar[int] = 66
    entry: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Admitted.entry", self.entry)


@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """The entry does not exist; `reason` is one of REJECTIONS, `detail` names value and limit."""

    OP: ClassVar[int] = 67
    entry: int
    reason: str
    detail: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Rejected.entry", self.entry)
        _one_of("Rejected.reason", self.reason, REJECTIONS)
        _text("Rejected.detail", self.detail)


@dataclass(frozen=True, slots=True)
class Stored(Message):
    """The entry is in the arena; its source range is free. `mode` is the codec mode it got."""

    OP: ClassVar[int] = 68
    entry: int
    stored_bytes: int
    mode: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Stored.entry", self.entry)
        _id("Stored.stored_bytes", self.stored_bytes)
        _text("Stored.mode", self.mode)


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """The destination range of the ticket holds the entry's verified bytes."""

    OP: ClassVar[int] = 69
    ticket: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Restored.ticket", self.ticket)


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """An admitted entry or a restore came to nothing.

    `entry` always names the entry; `ticket` is 0 where the store failed. `kind` is a name of the
    client's errors: "CorruptBlob" or "ActivationLost". The source or destination range is free.
    """

    OP: ClassVar[int] = 70
    ticket: int
    entry: int
    kind: str
    detail: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _id("Failed.ticket", self.ticket)
        _id("Failed.entry", self.entry)
        _text("Failed.kind", self.kind)
        _text("Failed.detail", self.detail)


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """Answers Ping."""

    OP: ClassVar[int] = 71


@dataclass(frozen=True, slots=True)
class Status(Message):
    """The daemon's state, the object that `stormd status --json` prints."""

    OP: ClassVar[int] = 72
    state: dict[str, Any]

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if type(self.state) is not dict:
            raise ProtocolError(f"Status.state is {type(self.state).__name__}, not a map")


@dataclass(frozen=True, slots=True)
class Refused(Message):
    """A request was not carried out; nothing changed.

    `kind` is a name of the client's errors ("ProtocolMismatch", "UsageError", "QuotaExceeded",
    "DaemonLost"), `detail` names value, limit and next step.
    """

    OP: ClassVar[int] = 73
    kind: str
    detail: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _text("Refused.kind", self.kind)
        _text("Refused.detail", self.detail)


def message_types() -> dict[int, type[Message]]:
    """Return every message type by its OP."""
    return {kind.OP: kind for kind in Message.__subclasses__()}


_FIELD_NAMES: dict[type[Message], tuple[str, ...]] = {}


def _field_names(kind: type[Message]) -> tuple[str, ...]:
    names = _FIELD_NAMES.get(kind)
    if names is None:
        names = _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind))
    return names


# --- checks ---------------------------------------------------------------------------------
# `type(x) is int` and not isinstance: True is an int to isinstance, and no id.


def _id(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise ProtocolError(f"{name} is {_shown(value)}, not an integer in 0 .. 2^63-1")


def _size(name: str, value: object) -> None:
    if type(value) is not int or not 0 < value <= MAX_ENTRY_BYTES:
        raise ProtocolError(f"{name} is {_shown(value)}, not in 1 .. {MAX_ENTRY_BYTES} bytes")


def _ids(name: str, value: object) -> None:
    if type(value) is not list or len(value) > MAX_BATCH:
        raise ProtocolError(f"{name} is {_shown(value)}, not a list of at most {MAX_BATCH} ids")
    for item in value:
        _id(name, item)


def _seconds(name: str, value: object) -> None:
    if type(value) is not float or not 0.0 < value < 1e9:
        raise ProtocolError(f"{name} is {_shown(value)}, not a positive number of seconds")


def _text(name: str, value: object) -> None:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ProtocolError(f"{name} is {_shown(value)}, not text of at most {MAX_TEXT} characters")


def _texts(name: str, value: object) -> None:
    if type(value) is not list or len(value) > 64:
        raise ProtocolError(f"{name} is {_shown(value)}, not a list of at most 64 texts")
    for item in value:
        _text(name, item)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if type(value) is not str or value not in allowed:
        raise ProtocolError(f"{name} is {_shown(value)}, not one of {', '.join(allowed)}")


def _blob(name: str, value: object) -> None:
    if type(value) is not bytes or len(value) > MAX_HANDLE_BYTES:
        raise ProtocolError(f"{name} is {_shown(value)}, not at most {MAX_HANDLE_BYTES} bytes")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
