"""The messages of the shared cache; only sessions whose Hello has the feature "cache" send them.

They are declared as those in messages.py are. In such a session every Store belongs to the put that
is open, which is at most one.

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

from typing import Annotated, Final

from stormd.protocol.declaring import Message, flag, list_of, message, name, seconds, text
from stormd.protocol.errors import ProtocolError
from stormd.protocol.fields import ID, Id, Ids, PartBytes, Text
from stormd.protocol.limits import MAX_BATCH, MAX_DIMENSIONS, MAX_DTYPE, MAX_NAME

__all__ = [
    "CACHE_FEATURE",
    "NAMES_A_PAGE",
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
Flag = Annotated[bool, flag()]


# --- from the client ------------------------------------------------------------------------


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


# --- from the daemon ------------------------------------------------------------------------


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
