"""What autograd holds instead of tensors, and what those share.

What stays true: only handles keep a record alive, and only records keep stored bytes alive. When
autograd drops the last handle of a record, in whatever way, the record dies with it and its
entries are queued for release; nothing else has to happen, and nobody has to remember it.

A **view** says how a tensor lies in its storage, a **record** is one stored range of a storage, a
**handle** is one saved tensor: a view of a record, at a version.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from storm_client.errors import StormError
from storm_client.versions import SavedVersion

if TYPE_CHECKING:
    from storm_client.stats import StatsRecorder

__all__ = [
    "Course",
    "DeadRecord",
    "Handle",
    "Holder",
    "Located",
    "Part",
    "RecordGrave",
    "StoredRange",
    "View",
]


class View(NamedTuple):
    """How a tensor lies in its storage; `offset` counts bytes from the storage's start."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Describe a strided tensor."""
        return cls(
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()) * tensor.element_size(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def span(self) -> tuple[int, int]:
        """Return the first byte that the view touches and the one after the last."""
        if 0 in self.size:
            return self.offset, self.offset
        reach = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.offset, self.offset + (reach + 1) * self.dtype.itemsize

    def rebuild(self, located: Located) -> torch.Tensor:
        """Return the tensor over a storage that holds the bytes again."""
        offset = (self.offset - located.start) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=located.storage.device)
        tensor = empty.set_(located.storage, offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


class Located(NamedTuple):
    """Bytes in memory: a storage whose first byte is byte `start` of the original one."""

    storage: torch.UntypedStorage
    start: int
    is_original: bool = False
    """Whether nothing was copied: who made the bytes is as far ahead as without offload."""


class Holder(Protocol):
    """Who holds a record's bytes: a session."""

    def load(self, handle: Handle) -> Located:
        """Return where the bytes of a handle of it are in memory."""
        ...


class Course(Protocol):
    """What is expected to be asked for after a handle: its step knows."""

    def upcoming(self) -> list[StoredRange]:
        """Return the next living records, the nearest first."""
        ...

    def unseen(self) -> list[StoredRange | None]:
        """Return what of them has not been looked at, None for a dead one."""
        ...

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are here or have been requested."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `begin .. end` of a record's range, stored as `entry`."""

    entry: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the part's size."""
        return self.end - self.begin


class StoredRange:
    """Bytes `start .. start + nbytes` of a storage, on their way to the daemon or there.

    The session's lock protects it, except where a method says otherwise.
    """

    __slots__ = (
        "__weakref__",
        "_handles",
        "_restored",
        "_restored_ref",
        "_waiting",
        "being_restored",
        "error",
        "key",
        "nbytes",
        "origin",
        "parts",
        "pointer",
        "session",
        "source",
        "start",
        "stats",
        "storage_nbytes",
        "version",
    )

    def __init__(
        self,
        session: Holder,
        storage: torch.UntypedStorage,
        span: tuple[int, int],
        version: SavedVersion,
        stats: StatsRecorder,
    ) -> None:
        """Describe the bytes `span` of `storage` and keep the storage until it is let go.

        `session` is the one that holds them and gives them back.
        """
        self.key = next(_KEYS)
        self.session = session
        self.start = span[0]
        self.nbytes = span[1] - span[0]
        self.version = version
        self.stats = stats
        self.source: torch.UntypedStorage | None = storage
        self.origin = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.pointer = storage.data_ptr()
        self.storage_nbytes = storage.nbytes()
        self.parts: list[Part] = []
        self.error: StormError | None = None
        self.being_restored = False
        self._handles: dict[int, weakref.ref[Handle]] = {}
        self._waiting: set[int] = set()
        self._restored: torch.UntypedStorage | None = None
        self._restored_ref: StorageWeakRef | None = None

    def covers(self, storage: torch.UntypedStorage, span: tuple[int, int], version: int) -> bool:
        """Tell whether it holds `span` of `storage` as that is now, at `version`."""
        return (
            self.start <= span[0]
            and span[1] <= self.start + self.nbytes
            and self.version.expected == version
            and self.version.unchanged
            and self.error is None
            and self.is_whole(storage)
        )

    @property
    def is_away(self) -> bool:
        """Whether its bytes are only with the daemon, and nobody is fetching them."""
        return (
            self.source is None
            and not self.being_restored
            and self.error is None
            and bool(self.parts)
            and self.locate() is None
        )

    def locate(self) -> Located | None:
        """Return the bytes if they are in memory: the original storage or a restored one.

        The original is as good as what was stored: a handle has checked its version before.
        """
        storage = self.source
        if storage is None:
            storage = _revive(self.origin)
        if storage is not None and self.is_whole(storage):
            return Located(storage, 0, is_original=True)
        restored = self._restored
        if restored is None and self._restored_ref is not None:
            restored = _revive(self._restored_ref)
        return None if restored is None else Located(restored, self.start)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Keep what was restored for as long as a handle has not been unpacked since."""
        self._restored_ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._waiting = set(self._handles)
        self._restored = storage
        self._let_go_if_unneeded()

    def unpacked(self, handle: Handle) -> None:
        """Note that `handle` has had the restored bytes."""
        self._waiting.discard(id(handle))
        self._let_go_if_unneeded()

    def add(self, handle: Handle) -> None:
        """Count a new handle."""
        self._handles[id(handle)] = _HandleRef(handle, self)

    def forget(self, handle: int) -> None:
        """Discount the handle of that id. Needs no lock: autograd drops handles anywhere."""
        self._handles.pop(handle, None)
        self._waiting.discard(handle)
        self._let_go_if_unneeded()

    def _let_go_if_unneeded(self) -> None:
        # In this order and after the assignments in hold(): a handle that dies between them
        # is seen by one side or the other, whichever thread it dies in.
        if not self._waiting:
            self._restored = None

    def is_whole(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether the storage still has its memory: resizing to 0 and back changes it."""
        return storage.data_ptr() == self.pointer and storage.nbytes() == self.storage_nbytes


class Handle:
    """What autograd keeps instead of one offloaded tensor. Its death is all the clean-up."""

    __slots__ = ("__weakref__", "number", "record", "step", "version", "view")

    def __init__(
        self, record: StoredRange, view: View, version: SavedVersion, step: Course, number: int
    ) -> None:
        """Keep `record` alive; `number` is the handle's place in the plan of `step`."""
        self.record = record
        self.view = view
        self.version = version
        self.step = step
        self.number = number
        record.add(self)


class _HandleRef(weakref.ref[Handle]):
    """Tells the record, without keeping it, that a handle died."""

    __slots__ = ("handle", "record")

    def __new__(cls, handle: Handle, record: StoredRange) -> _HandleRef:  # noqa: ARG004 - weakref.ref takes it in __new__ too
        return super().__new__(cls, handle, _handle_died)

    def __init__(self, handle: Handle, record: StoredRange) -> None:
        super().__init__(handle, _handle_died)  # type: ignore[call-arg]  # typeshed omits it
        self.handle = id(handle)
        self.record = weakref.ref(record)


def _handle_died(reference: _HandleRef) -> None:
    record = reference.record()
    if record is not None:
        record.forget(reference.handle)


class DeadRecord(weakref.ref[StoredRange]):
    """Outlives a record and knows what has to be cleaned up after it."""

    __slots__ = ("key", "origin", "parts")

    def __new__(cls, record: StoredRange, bury: Callable[[DeadRecord], None]) -> DeadRecord:
        return super().__new__(cls, record, bury)

    def __init__(self, record: StoredRange, bury: Callable[[DeadRecord], None]) -> None:
        super().__init__(record, bury)  # type: ignore[call-arg]  # typeshed omits it
        self.key = record.key
        self.parts = record.parts
        self.origin = record.origin  # keeps the storage's address from being used again


class RecordGrave:
    """Where dead records wait for their clean-up, in the order of their deaths.

    Records die in any thread, with any lock held: burying takes none.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Call `wake` when one has arrived that nobody comes for yet."""
        self._wake = wake
        # Set before a wake, and taken back before what that was for is looked at.
        self._is_told = False
        self._dead: deque[DeadRecord] = deque()
        self._watched: dict[int, DeadRecord] = {}

    def watch(self, record: StoredRange) -> DeadRecord:
        """Return the reference that is buried when `record` dies."""
        reference = DeadRecord(record, self._bury)
        self._watched[record.key] = reference
        return reference

    def empty(self) -> list[DeadRecord]:
        """Return those that died since the last call; call with the session's lock held."""
        self._is_told = False
        dead = []
        while self._dead:
            reference = self._dead.popleft()
            self._watched.pop(reference.key, None)
            dead.append(reference)
        return dead

    def __len__(self) -> int:
        """Return the number of records that live or wait here."""
        return len(self._watched)

    def _bury(self, reference: DeadRecord) -> None:
        self._dead.append(reference)
        if not self._is_told:  # two threads that bury at once may both find it so, never neither
            self._is_told = True
            self._wake()


def _revive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage if something else still keeps it."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


_KEYS = count(1)
