"""What autograd holds instead of tensors, what those share, and how it is found again.

A **stored range** is one whole storage, a **handle** is one saved tensor: a view of a stored range,
at a version. All that is saved of a
storage while it is held shares one stored range, as PyTorch would keep one storage: what aliases
before aliases afterwards, at the same offsets.

Ownership is the clean-up: autograd holds handles, handles hold the stored range, and everything
else knows it weakly. When the last handle dies the range dies, and its death is queued.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from storm_client.errors import StormError
from storm_client.saved.snapshots import Ready, SnapshotProof
from storm_client.saved.versions import SavedVersion, View

if TYPE_CHECKING:
    from storm_client.lanes import Stream
    from storm_client.monitoring.shared_counts import RangeRecorder

__all__ = [
    "DeadRange",
    "Handle",
    "Holder",
    "Located",
    "Part",
    "RangePhase",
    "SavedStorages",
    "StoredRange",
    "UpcomingUses",
    "Use",
    "WeakStorage",
]


class Holder(Protocol):
    """Who holds a record's bytes: a session."""

    has_in_place: bool
    """Whether bytes may come back into memory of their own."""

    def load(self, use: Use, *, is_first: bool, may_hand_out: bool = False) -> Located:
        """Return where the bytes of a use of it are in memory, or will be in stream order."""
        ...

    def send(self, record: StoredRange) -> None:
        """Have a record of it leave, unless that was done."""
        ...

    def look_ahead(self, uses: UpcomingUses) -> None:
        """Begin to fetch what is used next."""
        ...


class UpcomingUses(Protocol):
    """What is expected to be asked for after a handle: its step knows."""

    @property
    def is_due(self) -> bool:
        """Whether it is worth a look what is needed next."""
        ...

    def upcoming(self) -> list[StoredRange]:
        """Return the next living records, the nearest first."""
        ...

    def unseen(self) -> list[StoredRange | None]:
        """Return what of them has not been looked at, None for a dead one."""
        ...

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are here or have been requested."""
        ...


class WeakStorage:
    """Knows a storage without keeping it, and keeps its address from being used for another one.

    PyTorch's own StorageWeakRef has a destructor in Python, in which an interrupt would be lost:
    this one has to be freed.
    """

    __slots__ = ("_pointer", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage._cdata
        self._pointer = storage._weak_ref()

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage if something else still keeps it; not after `free`."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return found

    def free(self) -> None:
        """Give the address up; once."""
        torch.UntypedStorage._free_weak_ref(self._pointer)  # type: ignore[no-untyped-call]


class Located(NamedTuple):
    """Where a record's bytes are in memory: its own storage, or one of the same size."""

    storage: torch.UntypedStorage
    is_original: bool = False
    """Whether nothing was copied: who made the bytes is as far ahead as without offload."""


class Part(NamedTuple):
    """The bytes of a record from `begin` on, stored as `entry`."""

    entry: int
    begin: int
    nbytes: int


class RangePhase(Enum):
    """Where the bytes of a stored range are, as far as its session has decided."""

    __hash__ = object.__hash__  # that of Enum is written in Python
    IN_USE = auto()
    """In its storage, which somebody else may hold: nothing has been sent."""
    LEAVING = auto()
    """On their way to the daemon, or held until there is a reason to send them."""
    STAYING = auto()
    """In its storage for good: the daemon does not take them, or they were needed first."""
    AWAY = auto()
    """With the daemon alone; or besides in memory that somebody has been given back."""
    RETURNING = auto()
    """A thread has the duty to bring them back; others wait for it."""
    LOST = auto()
    """The daemon has them no more: `error` says why."""


_NEXT: dict[RangePhase, tuple[RangePhase, ...]] = {
    RangePhase.IN_USE: (RangePhase.LEAVING, RangePhase.STAYING),
    RangePhase.LEAVING: (RangePhase.AWAY, RangePhase.STAYING, RangePhase.LOST),
    RangePhase.STAYING: (),
    RangePhase.AWAY: (RangePhase.RETURNING, RangePhase.LOST),
    RangePhase.RETURNING: (RangePhase.AWAY, RangePhase.LOST),
    RangePhase.LOST: (),
}


class StoredRange:
    """The bytes of one storage: held here, on their way to the daemon, or there.

    The session's lock protects it, except where a method says otherwise.
    """

    __slots__ = (
        "__weakref__",
        "_only",
        "_restored",
        "_uses",
        "_waiting",
        "codec",
        "dtype",
        "error",
        "key",
        "leaves",
        "nbytes",
        "parts",
        "phase",
        "place",
        "pointer",
        "proof",
        "ready",
        "session",
        "soon",
        "source",
        "stats",
        "stream",
        "weak",
    )

    def __init__(
        self,
        session: Holder,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        stats: RangeRecorder,
        *,
        codec: str = "raw",
        soon: bool = False,
        stream: Stream = None,
    ) -> None:
        """Describe `storage`, whose elements are of `dtype`, and keep it until it is let go.

        `session` is the one that holds its bytes and gives them back. `soon` says that it will be
        needed at once, `stream` behind what work its bytes are there.
        """
        self.key = next(_KEYS)
        self.session = session
        self.phase = RangePhase.IN_USE
        self.nbytes = storage.nbytes()
        self.dtype = dtype
        self.stats = stats
        self.codec = codec
        self.soon = soon
        self.stream = stream
        self.source: torch.UntypedStorage | None = storage
        self.weak = [WeakStorage(storage)]
        """Of the original storage, and of the one restored last."""
        self.pointer = storage.data_ptr()
        self.leaves: dict[int, torch.Tensor] = {}
        """What was saved and no operation made, by id: held as long as `source` may be shared, as
        PyTorch would hold it, since it may be given other data."""
        self.parts: list[Part] = []
        self.proof: SnapshotProof | None = None
        """Set while somebody else may hold the storage though its bytes have been sent."""
        self.ready: Ready | None = None
        """Set where its bytes can be read before there is a reason to send them."""
        self.error: StormError | None = None
        self._uses: dict[int, weakref.ref[Use]] = {}
        self._only: weakref.ref[Use] | None = None
        """Of the first use, as long as there is no other."""
        self._waiting: set[int] = set()
        self._restored: torch.UntypedStorage | None = None

    def move_to(self, phase: RangePhase) -> None:
        """Go on to the next phase, or stay in this one."""
        assert phase is self.phase or phase in _NEXT[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def lose(self, error: StormError) -> None:
        """Note why the daemon can no longer give the bytes back, unless they never left."""
        if self.phase not in (RangePhase.STAYING, RangePhase.LOST):
            self.error = error
            self.move_to(RangePhase.LOST)

    @property
    def is_wanted(self) -> bool:
        """Whether it has to be fetched before it can be used, and nobody is doing that."""
        return self.phase is RangePhase.AWAY and self.locate() is None

    def locate(self) -> Located | None:
        """Return the bytes if they are in memory: the original storage or a restored one.

        The original is what PyTorch would read: a handle has checked its version before. One that
        a library has emptied is of no use, one that it has filled again is.
        """
        storage = self.source
        if storage is None:
            storage = self.weak[0].storage()
        if storage is not None and storage.nbytes() >= self.nbytes:
            return Located(storage, is_original=True)
        restored = self._restored
        if restored is None and len(self.weak) > 1:
            restored = self.weak[-1].storage()
        return None if restored is None else Located(restored)

    def came_back(self, storage: torch.UntypedStorage, use: Use) -> None:
        """Keep what was restored for a use until each of the others has been unpacked since."""
        self.weak.append(WeakStorage(storage))
        while len(self.weak) > 2:
            self.weak.pop(1).free()
        self._waiting = set(self._uses)
        self._waiting.discard(use.key)
        self._restored = storage if self._waiting else None

    def unpacked(self, use: Use) -> None:
        """Note that `use` has had the restored bytes."""
        self._waiting.discard(use.key)
        if not self._waiting:
            self._restored = None

    def add(self, use: Use, tell: Tell) -> None:
        """Count a new use, whose death `tell` will be called at.

        That of an only one is the record's own, which is told of anyway.
        """
        if not self._uses:
            self._uses[use.key] = self._only = weakref.ref(use)
            return
        only, self._only = self._only, None
        if only is not None and (first := only()) is not None:
            self._watch(first, tell)
        elif only is not None:
            self._uses.clear()
            self._waiting.clear()
        self._watch(use, tell)

    def _watch(self, use: Use, tell: Tell) -> None:
        reference = _UseRef(use, tell)
        reference.use, reference.record = use.key, weakref.ref(self)
        self._uses[use.key] = reference

    def forget(self, use: int) -> None:
        """Discount the use of that key."""
        self._uses.pop(use, None)
        self._waiting.discard(use)
        if not self._waiting:
            self._restored = None

    def is_whole(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether the storage still has its memory: resizing to 0 and back changes that."""
        return storage.data_ptr() == self.pointer and storage.nbytes() == self.nbytes


class Use:
    """What keeps a stored range for one saved tensor. Its death is all the clean-up."""

    __slots__ = ("__weakref__", "key", "number", "record", "step")

    def __init__(self, record: StoredRange, step: UpcomingUses, number: int) -> None:
        """Keep `record` alive; `number` is the place in the plan of `step`."""
        self.key = next(_KEYS)
        self.record = record
        self.step = step
        self.number = number


class Handle(Use):
    """What autograd keeps instead of one offloaded tensor."""

    __slots__ = ("version", "view")

    def __init__(
        self,
        record: StoredRange,
        view: View,
        version: SavedVersion,
        step: UpcomingUses,
        number: int,
    ) -> None:
        """Keep `record` alive; `number` is the handle's place in the plan of `step`."""
        super().__init__(record, step, number)
        self.view = view
        self.version = version


Tell: TypeAlias = Callable[[Any], None]
"""What a death calls, in which no Python code runs: a deque's `append`."""


class _UseRef(weakref.ref[Use]):
    """Tells of a use's death by being appended where its record's deaths are looked for."""

    __slots__ = ("record", "use")
    use: int
    record: weakref.ref[StoredRange]


class DeadRange(weakref.ref[StoredRange]):
    """Outlives a record and knows what has to be cleaned up after it."""

    __slots__ = ("address", "key", "parts", "weak")
    key: int
    parts: list[Part]
    address: int
    weak: list[WeakStorage]
    """These keep the storage's address from being used again."""


class SavedStorages:
    """The stored ranges of a session, found by their storages until they die, and their deaths.

    A storage is known by the address of its implementation; the weak reference in DeadRange keeps
    that address from being used for another one. The session's lock protects the table.

    Uses and records die in any thread, with any lock held, and where a signal may strike: Python
    swallows what a handler raises in a destructor's callback that is written in Python. So the
    callback is a deque's `append`, and whoever holds the lock looks there from time to time.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.deaths: deque[weakref.ref[Any]] = deque()
        """What died and nobody has looked at, in the order of the deaths."""
        self._tell = self.deaths.append
        self._records: dict[int, DeadRange] = {}
        """By key: of those that live, or whose deaths wait."""
        self._latest: dict[int, DeadRange] = {}
        """By the storage's address: of the record that was made of it last."""

    def find(self, storage: torch.UntypedStorage) -> StoredRange | None:
        """Return the latest record of `storage`, if it lives."""
        reference = self._latest.get(storage._cdata)
        return None if reference is None else reference()

    def add(self, record: StoredRange) -> DeadRange:
        """Let a record be found until its storage has another; return what its death is told by."""
        reference = DeadRange(record, self._tell)
        reference.key, reference.parts = record.key, record.parts
        reference.address, reference.weak = record.weak[0].address, record.weak
        self._records[record.key] = reference
        self._latest[reference.address] = reference
        return reference

    def add_use(self, use: Use) -> None:
        """Have the record told of the death of a use of it."""
        use.record.add(use, self._tell)

    def dead(self) -> Iterator[DeadRange]:
        """Yield the records that died, and forget them.

        One at which the loop is interrupted is yielded again the next time.
        """
        while self.deaths:
            reference = self.deaths[0]
            if isinstance(reference, DeadRange):
                yield reference
                self._records.pop(reference.key, None)
                if self._latest.get(reference.address) is reference:
                    del self._latest[reference.address]
                while reference.weak:
                    reference.weak.pop().free()
            elif isinstance(reference, _UseRef) and (record := reference.record()) is not None:
                record.forget(reference.use)
            self.deaths.popleft()

    def living(self) -> Iterator[StoredRange]:
        """Yield the records that live."""
        for reference in list(self._records.values()):
            record = reference()
            if record is not None:
                yield record

    def __len__(self) -> int:
        """Return the number of records that live, or whose deaths wait."""
        return len(self._records)


_KEYS = count(1)
