"""The messages of the control plane.

Each is declared here once: its number, its fields in the order they travel, and what each may be.
A field is only ever added or taken away together with a new PROTOCOL_VERSION.

Client to daemon: Hello or Resume first, then MapSegment / ReserveRange / MapPiece / UnmapSegment,
Store / StoreParts, Restore / RestoreParts, Release, Ping, StatusRequest, PlanLearned, ListEntries,
Goodbye. Daemon to client: Welcome, Mapped, Admitted / Rejected, Stored / StoredParts,
Restored / RestoredParts, Failed, Pong, Status, Entries, Refused.

One storage of the client travels as one or more entries. The way of an entry:
    Store  ->  Admitted   the pool has promised the room: the entry will not be lost to a limit
           ->  Stored     its bytes are encoded: the staging range may be used again; where that
                          leaves in the same frame Admitted is left out, and Stored says both
           or  Rejected   the entry does not exist: the tensor stays with the client
    Restore -> Restored   the destination range holds the verified bytes
           or  Failed     the bytes cannot be had (CorruptBlob, a lane's error)
    Release -> (no answer) the entry is gone as soon as nothing uses it
A Store that is sent again behind Resume is answered as the first one was: an entry is stored once.

Messages of the shared cache are sent by sessions alone whose Hello has the feature "cache". In such
a session every Store belongs to the put that is open, which is at most one.

    CachePut    -> CacheReady     the put is open, and room for it can be had
                or Refused        nothing has changed
    then its Stores, in chunks of `part_bytes`, the last of what is left
    CacheCommit -> CacheFound     the name now means these bytes, at once and for everybody
                or Refused        the put is still open
    CacheCancel -> CacheFound     the put is closed and holds nothing; `found` if one was open
    CacheGet    -> CacheTensor    its entries can be restored until they are released
                or CacheFound     there is none that this user may read
    CacheFind, CacheDelete -> CacheFound
    CacheList   -> CacheNames     at most NAMES_A_PAGE, sorted

A session that ends cancels its put and releases what it was lent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from stormd.protocol.declaring import Message, list_of, message, name, seconds, text
from stormd.protocol.errors import ProtocolError
from stormd.protocol.fields import (
    ID,
    STORE_FIELDS,
    Binary,
    BudgetText,
    Codec,
    Device,
    Flag,
    Id,
    Ids,
    PartBytes,
    Rejection,
    RestoredPlaces,
    RestorePlaces,
    Seconds,
    SecondsOrNone,
    State,
    StoredPlaces,
    StorePlaces,
    Text,
    Texts,
    unpack,
)
from stormd.protocol.limits import MAX_BATCH, MAX_DIMENSIONS, MAX_DTYPE, MAX_ENTRY_BYTES, MAX_NAME

__all__ = [
    "CACHE_FEATURE",
    "NAMES_A_PAGE",
    "Admitted",
    "CacheCancel",
    "CacheCommit",
    "CacheDelete",
    "CacheFind",
    "CacheFound",
    "CacheGet",
    "CacheList",
    "CacheNames",
    "CachePut",
    "CacheReady",
    "CacheTensor",
    "Entries",
    "Failed",
    "Goodbye",
    "Hello",
    "ListEntries",
    "MapPiece",
    "MapSegment",
    "Mapped",
    "PassOver",
    "Ping",
    "PlanLearned",
    "Pong",
    "Refused",
    "Rejected",
    "Release",
    "ReserveRange",
    "Restore",
    "RestoreParts",
    "Restored",
    "RestoredParts",
    "Resume",
    "Status",
    "StatusRequest",
    "Store",
    "StoreParts",
    "Stored",
    "StoredParts",
    "UnmapSegment",
    "Welcome",
    "part_count",
]


CACHE_FEATURE: Final = "cache"
"""In Hello.features: this session is for the cache. In Welcome.features: there is one."""

NAMES_A_PAGE: Final = 512
"""Names in one CacheNames: the longest ones fill half a frame."""


def part_count(nbytes: int, part_bytes: int) -> int:
    """Return in how many chunks a tensor travels."""
    return -(-nbytes // part_bytes)


# --- the types of fields --------------------------------------------------------------------

Name = Annotated[str, name(MAX_NAME)]
Names = Annotated[list[str], list_of(name(MAX_NAME), NAMES_A_PAGE, "names")]
Dtype = Annotated[str, text(MAX_DTYPE)]
Shape = Annotated[list[int], list_of(ID, MAX_DIMENSIONS, "sizes")]
TimeToLive = Annotated[float, seconds(above_zero=False)]


# --- from the client ------------------------------------------------------------------------


@message(1, kw_only=True)
class Hello(Message):
    """Asks for a session. The first message of a connection; anything else before it is refused.

    `device` says which lane the session is for: one of DEVICES, or NO_LANE for a session that asks
    for the state and holds nothing, and so takes nobody's share. `device_uuid` is the CUDA device's
    UUID as text, empty elsewhere. `staging_bytes` is the size of staging area that the client would
    like; Welcome says what it got.
    """

    protocol: Id
    features: Texts
    pid: Id
    uid: Id
    device: Device
    device_uuid: Text
    staging_bytes: Id
    name: Text


@message(2, kw_only=True)
class MapSegment(Message):
    """Offers an allocation of the client as segment `segment` of its session (cuda lane).

    `handle` is the CUDA IPC handle, `nbytes` the allocation's size. Answered by Mapped or Refused.
    Segment 0 is the staging area: on the cpu lane it exists from Welcome on and is never mapped by
    message.
    """

    segment: Id
    handle: Binary
    nbytes: Id


@message(3)
class UnmapSegment(Message):
    """Takes a segment back, or a piece of one. No answer; nothing in flight uses it by then.

    A restore into it that waits for its entry's store fails. A range goes with all its pieces.
    """

    segment: Id


@message(14)
class ReserveRange(Message):
    """Makes segment `segment` a range of `nbytes` addresses with nothing at them (cuda lane).

    Jobs may name what MapPiece has mapped of it. Answered by Mapped or Refused.
    """

    segment: Id
    nbytes: Id


@message(15, kw_only=True)
class MapPiece(Message):
    """Offers memory that is mapped at `offset` of the range `into`: `nbytes`, all there is of it.

    `segment` is a number of its own, by which UnmapSegment takes it back; jobs name the range. Its
    descriptor comes on the lifeline with that number, in PIECE_NUMBER_BYTES, least first; message
    and descriptor wait for each other. Answered by Mapped or Refused.
    """

    segment: Id
    into: Id
    offset: Id
    nbytes: Id


@message(4, kw_only=True)
class Store(Message):
    """Asks to store `nbytes` at `offset` of `segment` as entry `entry`.

    `entry` is chosen by the client, larger than every one before it in the session. `dtype` is a
    name of storm_kernels' dtypes ("bfloat16", "uint8", ...), a hint for the codec. `sequence` is
    the value of the session's `published` timeline that says the bytes are there (cuda lane; 0
    on the cpu lane, where they are there when the message is sent).

    `ready` is a smaller value of `published` that says already that the bytes are there, 0 where
    none does. `stored` is raised to `sequence` all the same, once all smaller ones have been read;
    in a session that outlives the daemon, once what came of them is in the pool and written down.
    """

    entry: Id
    segment: Id
    offset: Id
    nbytes: PartBytes
    dtype: Text
    codec: Codec
    sequence: Id
    ready: Id = 0


@message(5, kw_only=True)
class Restore(Message):
    """Asks for the bytes of `entry` at `offset` of `segment`; `ticket` names this request.

    `sequence` is the value of `published` from which on the destination may be written (cuda).
    """

    ticket: Id
    entry: Id
    segment: Id
    offset: Id
    nbytes: PartBytes
    sequence: Id


@message(6)
class Release(Message):
    """Gives entries up. Ids that do not exist (rejected stores) are passed over."""

    entries: Ids


@message(7)
class Ping(Message):
    """A heartbeat; renews the session's lease. Answered by Pong."""


@message(8, costly=True)
class StatusRequest(Message):
    """Asks for the daemon's state; allowed without a session. Answered by Status."""


@message(9)
class Goodbye(Message):
    """Ends the session in order. Answered by closing the lifeline once all is freed."""


@message(10, kw_only=True)
class PlanLearned(Message):
    """Tells what a step of the session's trainer does, in bytes of tensors, for people who watch.

    `kept_bytes` stay on the device, `offloaded_bytes` go to the daemon, `replayed_bytes` are made
    again; `budget` is what was asked for, as "least" or "12.0 GiB". The last one counts. No answer;
    refused in a session that stores nothing.
    """

    kept_bytes: Id
    offloaded_bytes: Id
    replayed_bytes: Id
    budget: BudgetText


@message(11, kw_only=True)
class Resume(Message):
    """Asks for a session that an earlier daemon opened, in the place of Hello.

    `epoch` and `secret` are those of the session's Welcome, and so is `session`. Answered by
    Welcome, with another token: the client sends the descriptors that it had of the session's
    shared memory along with that, and asks by ListEntries what there is yet. Segments that it maps
    have to be offered again. Refused as "DaemonLost" where the daemon has no such session.
    """

    protocol: Id
    epoch: Id
    session: Id
    secret: Binary
    pid: Id
    uid: Id


@message(12, costly=True)
class ListEntries(Message):
    """Asks which entries the session has, in the order of their numbers. Answered by Entries.

    Those up to `after` are left out.
    """

    after: Id


@message(13)
class PassOver(Message):
    """Says that of the numbers up to `sequence` no store will come that has not been asked for.

    So `stored` is raised to it once those that have been are done: a client that resumes a session
    asks for no store again that was answered, and may wait for its number yet (cuda lane). No
    answer. Greater than the `sequence` of every Store before it, and less than those behind it.
    """

    sequence: Id


@message(23)
class RestoreParts(Message):
    """Asks for several entries, in this order.

    `places` has six numbers for each: ticket, entry, segment, offset, nbytes and sequence, which
    mean what they mean in Restore. Answered by RestoredParts, or Failed for each that cannot be
    had.
    """

    places: RestorePlaces


@message(24, kw_only=True)
class StoreParts(Message):
    """Asks to store several entries, in this order, all with the same `dtype` and `codec`.

    `places` has six numbers for each: entry, segment, offset, nbytes, sequence and ready, which
    mean what they mean in Store. Each is answered as Store is, with its entry's number as that of
    the request.
    """

    dtype: Text
    codec: Codec
    places: StorePlaces

    def check_together(self) -> None:
        """Raise ProtocolError where an entry has a size that none may have."""
        for nbytes in _sizes(self.places):
            if not 1 <= nbytes <= MAX_ENTRY_BYTES:
                raise ProtocolError(
                    f"StoreParts.places has an entry of {nbytes} bytes, not in 1 .. "
                    f"{MAX_ENTRY_BYTES}"
                )

    def stores(self) -> Iterator[Store]:
        """Return what asks for each alone."""
        dtype, codec = self.dtype, self.codec
        for entry, segment, offset, nbytes, sequence, ready in unpack(self.places, STORE_FIELDS):
            yield Store.from_wire([entry, segment, offset, nbytes, dtype, codec, sequence, ready])


def _sizes(places: bytes) -> list[int]:
    return [nbytes for _, _, _, nbytes, _, _ in unpack(places, STORE_FIELDS)]


# --- from the daemon ------------------------------------------------------------------------


@message(64, kw_only=True)
class Welcome(Message):
    """Grants a session.

    The client now connects to the stream socket at `lifeline`, sends `token`, and receives file
    descriptors over it: the timeline page, and on the cpu lane the staging area of
    `staging_bytes`; none without a lane. The session lives as long as that connection.
    `part_bytes` is the largest entry this lane takes; `lease_seconds` how long the session outlives
    its last message.

    Where `resume_seconds` is not 0, the session outlives the daemon. Another at the same address
    is waited for so long, and takes the session on for who says its `secret` and the `epoch`.
    """

    session: Id
    token: Binary
    protocol: Id
    features: Texts
    version: Text
    lifeline: Text
    staging_bytes: Id
    part_bytes: PartBytes
    lease_seconds: Seconds
    resume_seconds: SecondsOrNone = 0.0
    epoch: Id = 0
    secret: Binary = b""


@message(65)
class Mapped(Message):
    """The segment is mapped and may be named in Store and Restore."""

    segment: Id


@message(66)
class Admitted(Message):
    """The pool has promised room for the entry: it will be stored."""

    entry: Id


@message(67)
class Rejected(Message):
    """The entry does not exist; `reason` is one of REJECTIONS, `detail` names value and limit."""

    entry: Id
    reason: Rejection
    detail: Text


@message(68)
class Stored(Message):
    """The entry is in the arena; its source range is free. `mode` is the codec mode it got."""

    entry: Id
    stored_bytes: Id
    mode: Text


@message(69)
class Restored(Message):
    """The destination range of the ticket holds the entry's verified bytes."""

    ticket: Id


@message(70)
class Failed(Message):
    """An admitted entry or a restore came to nothing.

    `entry` always names the entry; `ticket` is 0 where the store failed. `kind` is a name of the
    client's errors: "CorruptBlob" or "ActivationLost". The source or destination range is free.
    """

    ticket: Id
    entry: Id
    kind: Text
    detail: Text


@message(71, kw_only=True)
class Pong(Message):
    """Answers Ping, with how fast the session's bytes go, each way; 0 for what is not known.

    In bytes a second: `link` is what copies of late had of the device's link, `limit` what the
    settings allow, and `disk` what comes to the pool while the tier on disk is always busy.
    """

    link: Id
    limit: Id
    disk: Id


@message(72)
class Status(Message):
    """The daemon's state, the object that `stormd status --json` prints."""

    state: State


@message(73)
class Refused(Message):
    """A request was not carried out; nothing changed.

    `kind` is a name of the client's errors ("ProtocolMismatch", "UsageError", "QuotaExceeded",
    "DaemonLost"), `detail` names value, limit and next step.
    """

    kind: Text
    detail: Text


@message(74)
class Entries(Message):
    """Answers ListEntries: the numbers of entries, stored or yet to be, ENTRIES_A_PAGE at the most.

    Where `is_all` is false, others follow the last one.
    """

    numbers: Ids
    is_all: Flag


@message(77)
class RestoredParts(Message):
    """The destination ranges of these tickets, of RestoreParts, hold their verified bytes.

    `places` has one number for each: the ticket.
    """

    places: RestoredPlaces


@message(78)
class StoredParts(Message):
    """These entries are in the arena, as Stored says of each; all got the same codec mode.

    `places` has two numbers for each: the entry and its stored bytes.
    """

    places: StoredPlaces
    mode: Text


# --- of the shared cache ---------------------------------------------------------------------


@message(16, kw_only=True, costly=True)
class CachePut(Message):
    """Opens a put: asks for room for a tensor of `nbytes`, which comes in chunks of `part_bytes`.

    `dtype` and `shape` are handed back with the bytes and not looked at. `ttl_seconds` is how
    long the tensor is kept from its commit on at the most, 0 for no limit.
    """

    name: Name
    dtype: Dtype
    shape: Shape
    nbytes: Id
    part_bytes: PartBytes
    ttl_seconds: TimeToLive

    def check_together(self) -> None:
        """Refuse more chunks than one commit can name."""
        parts = part_count(self.nbytes, self.part_bytes)
        if parts > MAX_BATCH:
            raise ProtocolError(
                f"CachePut.nbytes is {self.nbytes}, in parts of {self.part_bytes} bytes {parts} of "
                f"them; the limit is {MAX_BATCH}"
            )


@message(17)
class CacheCommit(Message):
    """Closes the put: its name means these stored entries, in this order, from now on."""

    entries: Ids


@message(18)
class CacheCancel(Message):
    """Closes the put, if one is open, and gives up what was stored for it."""


@message(19, costly=True)
class CacheGet(Message):
    """Asks for the tensor of that name."""

    name: Name


@message(20)
class CacheFind(Message):
    """Asks whether there is a tensor of that name; does not count as a use of it."""

    name: Name


@message(21)
class CacheDelete(Message):
    """Deletes this user's tensor of that name; whoever reads it finishes."""

    name: Name


@message(22, costly=True)
class CacheList(Message):
    """Asks for the names that this user may read and that sort after `after`."""

    after: Text


@message(80)
class CacheReady(Message):
    """The put is open. Each Store makes room for itself; a put that gets none for long is closed.

    So one may be rejected ("pool_full") where what is there has come to be read, or put, meanwhile.
    """


@message(81, kw_only=True)
class CacheTensor(Message):
    """Lends the tensor's entries, `first_entry` and those after it, one a chunk.

    They stay as they are, whatever happens to the name, until Release or the session's end.
    """

    dtype: Dtype
    shape: Shape
    nbytes: Id
    part_bytes: PartBytes
    first_entry: Id


@message(82)
class CacheFound(Message):
    """Says whether what was asked about was there."""

    found: Flag


@message(83)
class CacheNames(Message):
    """Some of the names, sorted; `complete` where none follow."""

    names: Names
    complete: Flag
