"""The messages of the shared cache; only sessions whose Hello has the feature "cache" send them.

What stays true: what messages.py says of messages; and in such a session every Store belongs to
the put that is open, which is at most one.

    CachePut    -> CacheReady     room for the whole tensor is set aside
                or Refused        nothing has changed
    then its Stores, in parts of `part_bytes`, the last of what is left
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

from dataclasses import dataclass
from typing import ClassVar, Final

from stormd.protocol.checks import (
    check_dtype,
    check_flag,
    check_id,
    check_ids,
    check_name,
    check_shape,
    check_size,
    check_span,
    check_text,
)
from stormd.protocol.errors import ProtocolError
from stormd.protocol.limits import MAX_BATCH
from stormd.protocol.messages import Message

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
    """Return in how many parts a tensor travels."""
    return -(-nbytes // part_bytes)


# --- from the client ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachePut(Message):
    """Opens a put: asks for room for a tensor of `nbytes`, which comes in parts of `part_bytes`.

    `dtype` and `shape` are handed back with the bytes and not looked at. `ttl_seconds` is how
    long the tensor is kept from its commit on at the most, 0 for no limit.
    """

    OP: ClassVar[int] = 16
    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    part_bytes: int
    ttl_seconds: float

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_name("CachePut.name", self.name)
        check_dtype("CachePut.dtype", self.dtype)
        check_shape("CachePut.shape", self.shape)
        check_id("CachePut.nbytes", self.nbytes)
        check_size("CachePut.part_bytes", self.part_bytes)
        check_span("CachePut.ttl_seconds", self.ttl_seconds)
        parts = part_count(self.nbytes, self.part_bytes)
        if parts > MAX_BATCH:
            raise ProtocolError(
                f"CachePut.nbytes is {self.nbytes}, in parts of {self.part_bytes} bytes {parts} of "
                f"them; the limit is {MAX_BATCH}"
            )


@dataclass(frozen=True, slots=True)
class CacheCommit(Message):
    """Closes the put: its name means these stored entries, in this order, from now on."""

    OP: ClassVar[int] = 17
    entries: list[int]

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_ids("CacheCommit.entries", self.entries)


@dataclass(frozen=True, slots=True)
class CacheCancel(Message):
    """Closes the put, if one is open, and gives up what was stored for it."""

    OP: ClassVar[int] = 18


@dataclass(frozen=True, slots=True)
class CacheGet(Message):
    """Asks for the tensor of that name."""

    OP: ClassVar[int] = 19
    name: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_name("CacheGet.name", self.name)


@dataclass(frozen=True, slots=True)
class CacheFind(Message):
    """Asks whether there is a tensor of that name; does not count as a use of it."""

    OP: ClassVar[int] = 20
    name: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_name("CacheFind.name", self.name)


@dataclass(frozen=True, slots=True)
class CacheDelete(Message):
    """Deletes this user's tensor of that name; whoever reads it finishes."""

    OP: ClassVar[int] = 21
    name: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_name("CacheDelete.name", self.name)


@dataclass(frozen=True, slots=True)
class CacheList(Message):
    """Asks for the names that this user may read and that sort after `after`."""

    OP: ClassVar[int] = 22
    after: str

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_text("CacheList.after", self.after)


# --- from the daemon ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheReady(Message):
    """Room is set aside: no Store of this put will be rejected for want of it."""

    OP: ClassVar[int] = 80


@dataclass(frozen=True, slots=True)
class CacheTensor(Message):
    """Lends the tensor's entries, `first_entry` and those after it, one a part.

    They stay as they are, whatever happens to the name, until Release or the session's end.
    """

    OP: ClassVar[int] = 81
    dtype: str
    shape: list[int]
    nbytes: int
    part_bytes: int
    first_entry: int

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_dtype("CacheTensor.dtype", self.dtype)
        check_shape("CacheTensor.shape", self.shape)
        check_id("CacheTensor.nbytes", self.nbytes)
        check_size("CacheTensor.part_bytes", self.part_bytes)
        check_id("CacheTensor.first_entry", self.first_entry)


@dataclass(frozen=True, slots=True)
class CacheFound(Message):
    """Says whether what was asked about was there."""

    OP: ClassVar[int] = 82
    found: bool

    def __post_init__(self) -> None:
        """Check types and ranges."""
        check_flag("CacheFound.found", self.found)


@dataclass(frozen=True, slots=True)
class CacheNames(Message):
    """Some of the names, sorted; `complete` where none follow."""

    OP: ClassVar[int] = 83
    names: list[str]
    complete: bool

    def __post_init__(self) -> None:
        """Check types and ranges."""
        if type(self.names) is not list or len(self.names) > NAMES_A_PAGE:
            raise ProtocolError(f"CacheNames.names is no list of at most {NAMES_A_PAGE} names")
        for name in self.names:
            check_name("CacheNames.names", name)
        check_flag("CacheNames.complete", self.complete)
