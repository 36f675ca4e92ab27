"""The objects that autograd holds instead of tensors, the bytes that they share, and their table.

A **stored range** is one whole storage. A **handle** is one saved tensor: a view of a stored range,
at a version. All tensors that are saved of one storage while it is held share one stored range, as
PyTorch would keep one storage: tensors that alias before the save alias afterwards, at the same
offsets.

Ownership is the clean-up: autograd holds handles, handles hold the stored range, and everything
else refers to it weakly. When the last handle is freed, the range is freed, and its death is
queued.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch

from storm_client.errors import StormError
from storm_client.saved.snapshots import SnapshotProof
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


class UpcomingUses(Protocol):
    """Knows the records that are expected to be needed after a use."""

    @property
    def is_due(self) -> bool:
        """Whether to look at them now."""

    def upcoming(self) -> Sequence[StoredRange]:
        """Return the living records, the nearest first."""

    def unseen(self) -> Sequence[StoredRange | None]:
        """Return the records that have not been looked at, None for a freed one."""

    def saw(self, count: int) -> None:
        """Note that the first `count` of the unseen are restored or have been requested."""


class WeakStorage:
    """A weak reference to a storage that also keeps the storage's address from being reused.

    PyTorch's own StorageWeakRef has a destructor in Python, which would swallow an interrupt. This
    class has none: call `free`.
    """

    __slots__ = ("_pointer", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage._cdata
        self._pointer = storage._weak_ref()

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage if another reference keeps it alive; do not call it after `free`."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._pointer)
        return found

    def free(self) -> None:
        """Free the weak reference and so the address; call it once."""
        torch.UntypedStorage._free_weak_ref(self._pointer)  # type: ignore[no-untyped-call]


class Located(NamedTuple):
    """A record's bytes in memory: its own storage, or a restored one of the same size."""

    storage: torch.UntypedStorage
    is_original: bool = False
    """Whether nothing was copied: then streams need no more ordering than without offload."""


class Part(NamedTuple):
    """The bytes of a record from `begin` on, stored by the daemon as `entry`."""

    entry: int
    begin: int
    nbytes: int


class RangePhase(Enum):
    """Where a stored range's bytes are, by its session's decisions."""

    __hash__ = object.__hash__  # Enum's own is written in Python
    IN_USE = auto()
    """In the storage, which others may hold: nothing has been sent."""
    OFFLOADING = auto()
    """In flight to the daemon, or held until there is a reason to send them."""
    KEPT = auto()
    """In the storage for good: the daemon did not take them, or they were needed before that."""
    OFFLOADED = auto()
    """With the daemon, and possibly also in restored memory that somebody uses."""
    RESTORING = auto()
    """A thread has the duty to restore them; other threads wait for it."""
    LOST = auto()
    """The daemon no longer has them: `error` says why."""


_NEXT: dict[RangePhase, tuple[RangePhase, ...]] = {
    RangePhase.IN_USE: (RangePhase.OFFLOADING, RangePhase.KEPT),
    RangePhase.OFFLOADING: (RangePhase.OFFLOADED, RangePhase.KEPT, RangePhase.LOST),
    RangePhase.KEPT: (),
    RangePhase.OFFLOADED: (RangePhase.RESTORING, RangePhase.LOST),
    RangePhase.RESTORING: (RangePhase.OFFLOADED, RangePhase.LOST),
    RangePhase.LOST: (),
}


class Holder(Protocol):
    """The session that holds the bytes of stored ranges."""

    @property
    def has_in_place(self) -> bool:
        """Whether bytes may be restored into memory of their own, which must be used sparingly."""

    def send(self, record: StoredRange, /) -> None:
        """Send a record unless it was sent already or is kept."""

    def load(self, use: Use, /, *, is_first: bool = False, may_hand_out: bool = False) -> Located:
        """Return where the bytes of `use` are in memory; restore them if necessary."""

    def prefetch(self, uses: UpcomingUses, /) -> None:
        """Begin to prefetch the records used next, as far as there is room."""


class StoredRange:
    """The bytes of one storage: in memory, in flight to the daemon, or with the daemon.

    The session's lock protects a stored range, unless a method says otherwise.
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
        """Describe `storage`, with elements of `dtype`, and keep it alive until it is offloaded.

        `session` holds its bytes and restores them. `soon` says that the bytes will be needed at
        once. The bytes are complete after the present work of `stream`.
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
        """Weak references to the original storage and to the one restored last."""
        self.pointer = storage.data_ptr()
        self.leaves: dict[int, torch.Tensor] = {}
        """By id: saved tensors that no operation made. They are held while `source` may be shared,
        as PyTorch would hold them, since they may get other data (`tensor.data = other`)."""
        self.parts: list[Part] = []
        self.proof: SnapshotProof | None = None
        """Set while somebody else may hold the storage though its bytes have been sent."""
        self.error: StormError | None = None
        self._uses: dict[int, weakref.ref[Use]] = {}
        self._only: weakref.ref[Use] | None = None
        """The first use, while there is no other."""
        self._waiting: set[int] = set()
        self._restored: torch.UntypedStorage | None = None

    def move_to(self, phase: RangePhase) -> None:
        """Change to the next phase, or keep the present one."""
        assert phase is self.phase or phase in _NEXT[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def mark_lost(self, error: StormError) -> None:
        """Note why the daemon can no longer restore the bytes, unless they were never offloaded."""
        if self.phase not in (RangePhase.KEPT, RangePhase.LOST):
            self.error = error
            self.move_to(RangePhase.LOST)

    @property
    def is_wanted(self) -> bool:
        """Whether the bytes must be restored before use, and nobody is doing that."""
        return self.phase is RangePhase.OFFLOADED and self.locate() is None

    def locate(self) -> Located | None:
        """Return the bytes if they are in memory: in the original storage or in a restored one.

        PyTorch would read the original, whose version a handle has checked before. If a library has
        emptied the storage, its bytes are unusable; if it has filled the storage again, they are
        usable.
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

    def keep_restored(self, storage: torch.UntypedStorage, use: Use) -> None:
        """Keep the restored storage of `use` until all other uses have been unpacked, too."""
        self.weak.append(WeakStorage(storage))
        while len(self.weak) > 2:
            self.weak.pop(1).free()
        self._waiting = set(self._uses)
        self._waiting.discard(use.key)
        self._restored = storage if self._waiting else None

    def unpacked(self, use: Use) -> None:
        """Note that `use` has got the restored bytes."""
        self._waiting.discard(use.key)
        if not self._waiting:
            self._restored = None

    def add(self, use: Use, on_death: OnDeath) -> None:
        """Add a use; `on_death` is called when it is freed.

        A single use is not watched: it is freed together with the record, whose death is queued
        anyway.
        """
        if not self._uses:
            self._uses[use.key] = self._only = weakref.ref(use)
            return
        only, self._only = self._only, None
        if only is not None and (first := only()) is not None:
            self._watch(first, on_death)
        elif only is not None:
            self._uses.clear()
            self._waiting.clear()
        self._watch(use, on_death)

    def _watch(self, use: Use, on_death: OnDeath) -> None:
        reference = _UseRef(use, on_death)
        reference.use, reference.record = use.key, weakref.ref(self)
        self._uses[use.key] = reference

    def forget(self, use: int) -> None:
        """Remove the use with that key."""
        self._uses.pop(use, None)
        self._waiting.discard(use)
        if not self._waiting:
            self._restored = None

    def is_whole(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the storage still has its memory: resizing to 0 and back replaces it."""
        return storage.data_ptr() == self.pointer and storage.nbytes() == self.nbytes


class Use:
    """Keeps a stored range alive for one saved tensor. Freeing the use is all the clean-up."""

    __slots__ = ("__weakref__", "key", "number", "record", "step")

    def __init__(self, record: StoredRange, step: UpcomingUses, number: int) -> None:
        """Keep `record` alive; `number` is the use's place in the plan of `step`."""
        self.key = next(_KEYS)
        self.record = record
        self.step = step
        self.number = number


class Handle(Use):
    """Autograd's object for one offloaded tensor."""

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


OnDeath: TypeAlias = Callable[[Any], None]
"""A death calls this, and no Python code runs in it: a deque's `append`."""


class _UseRef(weakref.ref[Use]):
    """Queues the death of a use where the session looks for deaths."""

    __slots__ = ("record", "use")
    use: int
    record: weakref.ref[StoredRange]


class DeadRange(weakref.ref[StoredRange]):
    """Outlives a record and knows what to clean up after it."""

    __slots__ = ("address", "key", "parts", "weak")
    key: int
    parts: list[Part]
    address: int
    weak: list[WeakStorage]
    """Weak references that keep the storages' addresses from being reused."""


class SavedStorages:
    """The living stored ranges of a session, by storage, and a queue of their deaths.

    A storage is known by the address of its implementation; the weak reference in DeadRange keeps
    that address from being reused. The session's lock protects the table.

    Uses and records may be freed in any thread, with any lock held, and where a signal may come. If
    a destructor's callback is written in Python, Python swallows an exception that a signal handler
    raises in it. So the callback is a deque's `append`, and whoever holds the lock checks the queue
    from time to time.
    """

    def __init__(self) -> None:
        """Start without records."""
        self.deaths: deque[weakref.ref[Any]] = deque()
        """References to freed uses and records not handled yet, in the order of the deaths."""
        self._on_death = self.deaths.append
        self._records: dict[int, DeadRange] = {}
        """By key: the records that live, or whose deaths are still queued."""
        self._latest: dict[int, DeadRange] = {}
        """By the storage's address: the latest record of that storage."""

    def find(self, storage: torch.UntypedStorage) -> StoredRange | None:
        """Return the latest record of `storage`, if it lives."""
        reference = self._latest.get(storage._cdata)
        return None if reference is None else reference()

    def add(self, record: StoredRange) -> DeadRange:
        """Make a record findable by its storage; return the reference that its death will queue."""
        reference = DeadRange(record, self._on_death)
        reference.key, reference.parts = record.key, record.parts
        reference.address, reference.weak = record.weak[0].address, record.weak
        self._records[record.key] = reference
        self._latest[reference.address] = reference
        return reference

    def add_use(self, use: Use) -> None:
        """Add a use to its record; the use's death will be queued."""
        use.record.add(use, self._on_death)

    def dead(self) -> Iterator[DeadRange]:
        """Yield the queued dead records and forget them; forget dead uses, too.

        If the loop is interrupted at a record, the next call yields that record again.
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
        """Return the number of records that live, or whose deaths are still queued."""
        return len(self._records)


_KEYS = count(1)
