"""The messages of the control plane.

Each message is declared here once: its number, its fields in wire order, and their allowed values.
Adding or removing a field always requires a new PROTOCOL_VERSION.

Client to daemon: Hello or Resume first, then MapSegment / ReserveRange / MapPiece / UnmapSegment,
Store / StoreParts, Restore / RestoreParts, Release, Ping, StatusRequest, PlanLearned, ListEntries,
Goodbye. Daemon to client: Welcome, Mapped, Admitted / Rejected, Stored / StoredParts,
Restored / RestoredParts, Failed, Pong, Status, Entries, Refused.

One storage of the client travels as one or more entries. The life of an entry:
    Store  ->  Admitted   the pool has promised space: the entry will not be lost to a limit
           ->  Stored     its bytes are encoded: the staging range may be used again. If Stored
                          leaves in the same frame, Admitted is omitted and Stored implies it
           or  Rejected   the entry does not exist: the tensor is kept with the client
    Restore -> Restored   the destination range holds the verified bytes
           or  Failed     the bytes cannot be restored (CorruptBlob, a lane's error)
    Release -> (no answer) the entry is freed as soon as nothing uses it
A Store that is repeated after Resume gets the same answer as the first: an entry is stored once.

Only sessions whose Hello has the feature "cache" send messages of the shared cache. In such a
session every Store belongs to the open put; at most one put is open.

    CachePut    -> CacheReady     the put is open, and room for it can be made
                or Refused        nothing has changed
    then its Stores, in chunks of `part_bytes`; the last chunk has the remaining bytes
    CacheCommit -> CacheFound     the name now refers to these bytes, at once and for all users
                or Refused        the put is still open
    CacheCancel -> CacheFound     the put is closed and holds nothing; `found` if one was open
    CacheGet    -> CacheTensor    its entries can be restored until they are released
                or CacheFound     there is no such tensor that this user may read
    CacheFind, CacheDelete -> CacheFound
    CacheList   -> CacheNames     at most NAMES_A_PAGE, sorted

A session that ends cancels its put and releases the entries that the cache has lent it.
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
"""In Hello.features: this session uses the cache. In Welcome.features: the daemon has a cache."""

NAMES_A_PAGE: Final = 512
"""Maximum names in one CacheNames: this many of the longest names fill half a frame."""


def part_count(nbytes: int, part_bytes: int) -> int:
    """Return the number of chunks in which a tensor travels."""
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
    """Asks for a session. Before Hello or Resume, a connection may send only StatusRequest.

    `device` names the session's lane: one of DEVICES, or NO_LANE. A session with NO_LANE only asks
    for the state, holds nothing, and so takes nobody's share. `device_uuid` is the CUDA device's
    UUID as text, empty for other devices. `staging_bytes` is the size of staging area that the
    client would like; Welcome has the size that it gets.
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
    Segment 0 is the staging area: on the cpu lane it exists from Welcome on, and no message maps
    it.
    """

    segment: Id
    handle: Binary
    nbytes: Id


@message(3)
class UnmapSegment(Message):
    """Unmaps a segment, or a piece of a range. No answer; nothing in flight may use it by then.

    Restores into it fail if they still wait for their entry's store. Unmapping a range also unmaps
    all its pieces.
    """

    segment: Id


@message(14)
class ReserveRange(Message):
    """Makes segment `segment` a range of `nbytes` addresses without memory (cuda lane).

    Jobs may name only the parts of it that MapPiece has mapped. Answered by Mapped or Refused.
    """

    segment: Id
    nbytes: Id


@message(15, kw_only=True)
class MapPiece(Message):
    """Offers memory to be mapped at `offset` of the range `into`: all `nbytes` of the memory.

    `segment` is the piece's own number, by which UnmapSegment unmaps it; jobs name the range. The
    piece's descriptor comes on the lifeline with that number in PIECE_NUMBER_BYTES, lowest byte
    first. Message and descriptor may come in either order. Answered by Mapped or Refused.
    """

    segment: Id
    into: Id
    offset: Id
    nbytes: Id


@message(4, kw_only=True)
class Store(Message):
    """Asks to store `nbytes` at `offset` of `segment` as entry `entry`.

    The client chooses `entry`, larger than every earlier one of the session. `dtype` is the name of
    a storm_kernels dtype ("bfloat16", "uint8", ...), a hint for the codec. Once the session's
    `published` timeline reaches `sequence`, the bytes are ready (cuda lane). On the cpu lane it is
    0: the bytes are ready when the message is sent.

    The daemon raises `stored` to `sequence` once the stores of all smaller numbers have been read,
    too. In a session that outlives the daemon it waits until their results are in the pool and
    recorded.
    """

    entry: Id
    segment: Id
    offset: Id
    nbytes: PartBytes
    dtype: Text
    codec: Codec
    sequence: Id


@message(5, kw_only=True)
class Restore(Message):
    """Asks for the bytes of `entry` at `offset` of `segment`; `ticket` identifies this request.

    The destination may be written once `published` has reached `sequence` (cuda lane).
    """

    ticket: Id
    entry: Id
    segment: Id
    offset: Id
    nbytes: PartBytes
    sequence: Id


@message(6)
class Release(Message):
    """Releases entries. Ids that do not exist (rejected stores) are ignored."""

    entries: Ids


@message(7)
class Ping(Message):
    """A heartbeat; renews the session's lease. Answered by Pong."""


@message(8, costly=True)
class StatusRequest(Message):
    """Asks for the daemon's state; allowed without a session. Answered by Status."""


@message(9)
class Goodbye(Message):
    """Ends the session in order. Answered by closing the lifeline once everything is freed."""


@message(10, kw_only=True)
class PlanLearned(Message):
    """Describes a step of the session's trainer to operators, in bytes of tensors.

    `kept_bytes` are kept on the device, `offloaded_bytes` are offloaded to the daemon,
    `replayed_bytes` are recomputed. `budget` is the budget that was asked for, as "least" or
    "12.0 GiB". The last message replaces earlier ones. No answer; refused in a session that stores
    nothing.
    """

    kept_bytes: Id
    offloaded_bytes: Id
    replayed_bytes: Id
    budget: BudgetText


@message(11, kw_only=True)
class Resume(Message):
    """Asks to resume a session that an earlier daemon opened, instead of Hello.

    `epoch`, `session` and `secret` are those of the session's Welcome. Answered by Welcome with a
    new token. With that token the client sends its descriptors of the session's shared memory, then
    uses ListEntries to learn which entries still exist. It must offer its mapped segments again.
    Refused as "DaemonLost" if the daemon has no such session.
    """

    protocol: Id
    epoch: Id
    session: Id
    secret: Binary
    pid: Id
    uid: Id


@message(12, costly=True)
class ListEntries(Message):
    """Asks for the numbers of the session's entries, in ascending order. Answered by Entries.

    Numbers up to `after` are left out.
    """

    after: Id


@message(13)
class PassOver(Message):
    """Says that the client sends no further Store with a number up to `sequence` (cuda lane).

    The daemon raises `stored` to `sequence` once the stores that were sent before are done. A
    client that resumes a session does not repeat stores that were answered, but may still wait for
    their numbers. No answer. `sequence` is greater than that of every Store before this message,
    and less than that of every Store after it.
    """

    sequence: Id


@message(23)
class RestoreParts(Message):
    """Asks to restore several entries, in this order.

    `places` has six numbers for each: ticket, entry, segment, offset, nbytes and sequence, with the
    same meaning as in Restore. Answered by RestoredParts, or by Failed for each that cannot be
    restored.
    """

    places: RestorePlaces


@message(24, kw_only=True)
class StoreParts(Message):
    """Asks to store several entries, in this order, all with the same `dtype` and `codec`.

    `places` has five numbers for each: entry, segment, offset, nbytes and sequence, with the same
    meaning as in Store. Each gets its own answer as for Store, with the entry's number as request
    number.
    """

    dtype: Text
    codec: Codec
    places: StorePlaces

    def check_together(self) -> None:
        """Raise ProtocolError if an entry's size is not in 1 .. MAX_ENTRY_BYTES."""
        for _, _, _, nbytes, _ in unpack(self.places, STORE_FIELDS):
            if not 1 <= nbytes <= MAX_ENTRY_BYTES:
                raise ProtocolError(
                    f"StoreParts.places has an entry of {nbytes} bytes, not in 1 .. "
                    f"{MAX_ENTRY_BYTES}"
                )

    def stores(self) -> Iterator[Store]:
        """Return a separate Store for each entry."""
        dtype, codec = self.dtype, self.codec
        for entry, segment, offset, nbytes, sequence in unpack(self.places, STORE_FIELDS):
            yield Store.from_wire([entry, segment, offset, nbytes, dtype, codec, sequence])


# --- from the daemon ------------------------------------------------------------------------


@message(64, kw_only=True)
class Welcome(Message):
    """Grants a session.

    The client now connects to the stream socket at `lifeline`, sends `token`, and receives file
    descriptors over it: the timeline page, and on the cpu lane the staging area of
    `staging_bytes`; none without a lane. The session lives as long as that connection. If the
    daemon ends the session while it runs on, it first sends the reason there, as UTF-8.
    `part_bytes` is the size of the largest entry that this lane accepts. The session outlives its
    last message by `lease_seconds`.

    If `resume_seconds` is not 0, the session outlives the daemon. The client waits that long for
    another daemon at the same address, which resumes the session for a client that sends its
    `secret` and the `epoch`.
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
    """The pool has promised space for the entry: the entry will be stored."""

    entry: Id


@message(67)
class Rejected(Message):
    """The entry does not exist. `reason` is one of REJECTIONS, `detail` names value and limit."""

    entry: Id
    reason: Rejection
    detail: Text


@message(68)
class Stored(Message):
    """The entry is in the pool; its source range is free. `mode` is the mode the codec chose."""

    entry: Id
    stored_bytes: Id
    mode: Text


@message(69)
class Restored(Message):
    """The destination range of the ticket holds the entry's verified bytes."""

    ticket: Id


@message(70)
class Failed(Message):
    """Storing an admitted entry failed, or restoring one did.

    `entry` always names the entry; `ticket` is 0 if the store failed. `kind` is the name of one of
    the client's errors: "CorruptBlob" or "ActivationLost". The source or destination range is free.
    """

    ticket: Id
    entry: Id
    kind: Text
    detail: Text


@message(71, kw_only=True)
class Pong(Message):
    """Answers Ping with the speed of the session's transfers, in bytes per second; 0 if unknown.

    `link` is the bandwidth that recent copies had on the device's link, `limit` the bandwidth that
    the settings allow. `coding` is the rate at which the device encodes and then decodes bytes of
    tensors. `disk` is the rate at which bytes enter or leave the pool while the tier on disk is
    always busy, the lower of both.
    """

    link: Id = 0
    limit: Id = 0
    coding: Id = 0
    disk: Id = 0


@message(72)
class Status(Message):
    """The daemon's state, the object that `stormd status --json` prints."""

    state: State


@message(73)
class Refused(Message):
    """A request was not carried out; nothing changed.

    `kind` is the name of one of the client's errors ("ProtocolMismatch", "UsageError",
    "QuotaExceeded", "DaemonLost"). `detail` names value, limit and next step.
    """

    kind: Text
    detail: Text


@message(74)
class Entries(Message):
    """Answers ListEntries: at most ENTRIES_A_PAGE entry numbers, stored or still being stored.

    If `is_all` is false, more entries follow the last one.
    """

    numbers: Ids
    is_all: Flag


@message(77)
class RestoredParts(Message):
    """The destination ranges of these tickets of RestoreParts hold their verified bytes.

    `places` has one number for each: the ticket.
    """

    places: RestoredPlaces


@message(78)
class StoredParts(Message):
    """These entries are in the pool, as Stored says of one; all got the same codec mode.

    `places` has two numbers for each: the entry and its stored bytes.
    """

    places: StoredPlaces
    mode: Text


# --- of the shared cache ---------------------------------------------------------------------


@message(16, kw_only=True, costly=True)
class CachePut(Message):
    """Opens a put: asks for room for a tensor of `nbytes`, which is sent in chunks of `part_bytes`.

    The daemon returns `dtype` and `shape` with the bytes and does not interpret them. The tensor is
    kept for at most `ttl_seconds` after its commit; 0 sets no limit.
    """

    name: Name
    dtype: Dtype
    shape: Shape
    nbytes: Id
    part_bytes: PartBytes
    ttl_seconds: TimeToLive

    def check_together(self) -> None:
        """Raise ProtocolError if the tensor has more chunks than one commit can name."""
        parts = part_count(self.nbytes, self.part_bytes)
        if parts > MAX_BATCH:
            raise ProtocolError(
                f"CachePut.nbytes is {self.nbytes}, in parts of {self.part_bytes} bytes {parts} of "
                f"them; the limit is {MAX_BATCH}"
            )


@message(17)
class CacheCommit(Message):
    """Closes the put: from now on its name refers to these stored entries, in this order."""

    entries: Ids


@message(18)
class CacheCancel(Message):
    """Closes the put, if one is open, and frees the entries that were stored for it."""


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
    """Deletes this user's tensor of that name; reads in progress finish."""

    name: Name


@message(22, costly=True)
class CacheList(Message):
    """Asks for the names that this user may read and that sort after `after`."""

    after: Text


@message(80)
class CacheReady(Message):
    """The put is open. Each Store makes room for itself; a put without a Store for long is closed.

    So a Store may still be rejected ("pool_full"), if cached tensors are being read meanwhile, or
    others were put.
    """


@message(81, kw_only=True)
class CacheTensor(Message):
    """Lends the tensor's entries, one for each chunk, numbered from `first_entry` on.

    They are unchanged until Release or the session's end, whatever happens to the name.
    """

    dtype: Dtype
    shape: Shape
    nbytes: Id
    part_bytes: PartBytes
    first_entry: Id


@message(82)
class CacheFound(Message):
    """Says whether the tensor or put that the request named existed."""

    found: Flag


@message(83)
class CacheNames(Message):
    """One page of the names, sorted; `complete` if no more follow."""

    names: Names
    complete: Flag
