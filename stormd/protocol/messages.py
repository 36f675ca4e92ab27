"""Every message of the control plane, one frozen dataclass each.

What stays true: a message object that exists is valid. Construction checks types and ranges,
so neither side repeats a check, and decoding a hostile frame ends in ProtocolError before any
field is used. Fields travel by position; a field is only ever added together with a new
PROTOCOL_VERSION.

Client to daemon: Hello first, then MapSegment / UnmapSegment, Store, Restore, Release, Ping,
StatusRequest, Goodbye. Daemon to client: Welcome, Mapped, Admitted / Rejected, Stored,
Restored, Failed, Pong, Status, Refused. The shared cache's are in cache_messages.py.

One storage of the client travels as one or more entries. The way of an entry:
    Store  ->  Admitted   the pool has promised the room: the entry will not be lost to a limit
           ->  Stored     its bytes are encoded: the staging range may be used again
           or  Rejected   the entry does not exist: the tensor stays with the client
    Restore -> Restored   the destination range holds the verified bytes
           or  Failed     the bytes cannot be had (CorruptBlob, a lane's error)
    Release -> (no answer) the entry is gone as soon as nothing uses it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

from stormd.protocol.checks import (
    check_blob,
    check_id,
    check_ids,
    check_map,
    check_one_of,
    check_seconds,
    check_size,
    check_text,
    check_texts,
)

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
        kind = type(self)
        read = _READERS.get(kind)
        if read is None:
            read = _READERS[kind] = _reader(kind)
        return read(self)


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
        check_id("Hello.protocol", self.protocol)
        check_texts("Hello.features", self.features)
        check_id("Hello.pid", self.pid)
        check_id("Hello.uid", self.uid)
        check_one_of("Hello.device", self.device, DEVICES)
        check_text("Hello.device_uuid", self.device_uuid)
        check_texts("Hello.ipc_modes", self.ipc_modes)
        check_id("Hello.staging_bytes", self.staging_bytes)
        check_text("Hello.name", self.name)


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
        check_id("MapSegment.segment", self.segment)
        check_blob("MapSegment.handle", self.handle)
        check_id("MapSegment.buffer_id", self.buffer_id)
        check_id("MapSegment.nbytes", self.nbytes)


@dataclass(frozen=True, slots=True)
class UnmapSegment(Message):
    """Takes a segment back. No answer; the daemon unmaps it once nothing under way uses it.

    A restore into it that waits for its entry's store fails.
    """

    OP: ClassVar[int] = 3
    segment: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("UnmapSegment.segment", self.segment)


@dataclass(frozen=True, slots=True)
class Store(Message):
    """Asks to store `nbytes` at `offset` of `segment` as entry `entry`.

    `entry` is chosen by the client, larger than every one before it in the session. `dtype` is a
    name of storm_kernels' dtypes ("bfloat16", "uint8", ...), a hint for the codec. `sequence` is
    the value of the session's `published` timeline that says the bytes are there (cuda lane; 0
    on the cpu lane, where they are there when the message is sent).

    `result` is 0 where the daemon is to encode. Else the client has done so (cuda lane): a blob
    of the `nbytes` begins at `offset`, with room for the largest there may be, and the timeline
    page's result of that number says how long it is. Both stay until Stored, or Failed.
    """

    OP: ClassVar[int] = 4
    entry: int
    segment: int
    offset: int
    nbytes: int
    dtype: str
    codec: str
    sequence: int
    result: int = 0

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("Store.entry", self.entry)
        check_id("Store.segment", self.segment)
        check_id("Store.offset", self.offset)
        check_size("Store.nbytes", self.nbytes)
        check_text("Store.dtype", self.dtype)
        check_one_of("Store.codec", self.codec, CODECS)
        check_id("Store.sequence", self.sequence)
        check_id("Store.result", self.result)


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
        check_id("Restore.ticket", self.ticket)
        check_id("Restore.entry", self.entry)
        check_id("Restore.segment", self.segment)
        check_id("Restore.offset", self.offset)
        check_size("Restore.nbytes", self.nbytes)
        check_id("Restore.sequence", self.sequence)


@dataclass(frozen=True, slots=True)
class Release(Message):
    """Gives entries up. Ids that do not exist (rejected stores) are passed over."""

    OP: ClassVar[int] = 6
    entries: list[int]

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_ids("Release.entries", self.entries)


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
        check_id("Welcome.session", self.session)
        check_blob("Welcome.token", self.token)
        check_id("Welcome.protocol", self.protocol)
        check_texts("Welcome.features", self.features)
        check_text("Welcome.version", self.version)
        check_text("Welcome.lifeline", self.lifeline)
        check_id("Welcome.staging_bytes", self.staging_bytes)
        check_size("Welcome.part_bytes", self.part_bytes)
        check_seconds("Welcome.lease_seconds", self.lease_seconds)


@dataclass(frozen=True, slots=True)
class Mapped(Message):
    """The segment is mapped and may be named in Store and Restore."""

    OP: ClassVar[int] = 65
    segment: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("Mapped.segment", self.segment)


@dataclass(frozen=True, slots=True)
class Admitted(Message):
    """The pool has promised room for the entry: it will be stored."""

    OP: ClassVar[int] = 66
    entry: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("Admitted.entry", self.entry)


@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """The entry does not exist; `reason` is one of REJECTIONS, `detail` names value and limit."""

    OP: ClassVar[int] = 67
    entry: int
    reason: str
    detail: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("Rejected.entry", self.entry)
        check_one_of("Rejected.reason", self.reason, REJECTIONS)
        check_text("Rejected.detail", self.detail)


@dataclass(frozen=True, slots=True)
class Stored(Message):
    """The entry is in the arena; its source range is free. `mode` is the codec mode it got."""

    OP: ClassVar[int] = 68
    entry: int
    stored_bytes: int
    mode: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("Stored.entry", self.entry)
        check_id("Stored.stored_bytes", self.stored_bytes)
        check_text("Stored.mode", self.mode)


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """The destination range of the ticket holds the entry's verified bytes."""

    OP: ClassVar[int] = 69
    ticket: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_id("Restored.ticket", self.ticket)


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
        check_id("Failed.ticket", self.ticket)
        check_id("Failed.entry", self.entry)
        check_text("Failed.kind", self.kind)
        check_text("Failed.detail", self.detail)


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
        check_map("Status.state", self.state)


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
        check_text("Refused.kind", self.kind)
        check_text("Refused.detail", self.detail)


def message_types() -> dict[int, type[Message]]:
    """Return every message type by its OP."""
    return {kind.OP: kind for kind in Message.__subclasses__()}


_Reader = Callable[[Message], tuple[Any, ...]]
_READERS: dict[type[Message], _Reader] = {}


def _reader(kind: type[Message]) -> _Reader:
    """Return what reads all fields of such messages at once."""
    names = [field.name for field in fields(kind)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)
