"""What an Offload did, in bytes and counts, for the script to read.

Every byte that autograd saves counts once as saved. When the step's stores are settled, it also
counts in exactly one of skipped, deduplicated, offloaded, replayed and kept. The same holds for the
inputs of recomputations. Saved, skipped, deduplicated and replayed bytes are those of tensors.
Offloaded, stored and kept bytes are those of the storages behind them, so they differ where a
tensor is a view of a larger storage.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import NamedTuple

import torch

from storm_client.lanes.dtypes import ENCODED, dtype_name
from storm_client.monitoring.native_counts import NativeCounts
from storm_client.notebooks import table_html
from stormd.protocol.sizes import format_size

__all__ = ["KeptTotals", "OffloadStats", "StatsRecorder"]


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Totals of one Offload since it was created. Sizes in bytes, times in seconds.

    `str()` returns a table for people; notebooks show it.
    """

    saved_bytes: int
    """All that autograd saved, duplicates included."""
    skipped_bytes: int
    """Kept on the device by policy: parameters, small tensors and types that cannot be stored. Also
    tensors that are referenced elsewhere and could change ("in_use"), that the budget keeps
    ("budget"), or that are saved outside of the chosen layers ("outside"). Finally, those of a step
    that saves little and is faster if it keeps everything ("little")."""
    deduplicated_bytes: int
    """Duplicates: tensors in a range that was stored before."""
    offloaded_bytes: int
    """Sent to the daemon, before compression."""
    stored_bytes: int
    """Size of the offloaded bytes in the daemon's pool."""
    kept_bytes: int
    """To be offloaded, but kept on the device: the daemon did not accept the bytes."""
    replayed_bytes: int
    """Freed, and recomputed by the operations that made them."""
    skipped: Mapping[str, int]
    """Tensors kept by policy, by reason."""
    kept: Mapping[str, int]
    """Storage ranges that the daemon did not accept, by reason."""
    store_seconds: float
    """Spent by training threads on storing tensors."""
    restore_wait_seconds: float
    """Spent by training threads on waiting for restores."""
    replay_seconds: float
    """Spent by training threads on recomputation: on its launches, not on the device's work."""
    offloaded_by_dtype: Mapping[str, int]
    """Offloaded bytes by the dtype of the tensor that was saved first. "encoded" are blobs that an
    operation made (storm_kernels.gemm); they are copied unchanged."""
    stored_by_mode: Mapping[str, int]
    """Bytes in the pool by the codec's mode."""

    @property
    def ratio(self) -> float:
        """Offloaded over stored bytes, 1.0 if nothing has been stored."""
        return self.offloaded_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def __str__(self) -> str:
        """Return a table of the outcomes of all saved tensors."""
        lines = [f"{name:<18}  {size:>10}  {more}".rstrip() for name, size, more in self._rows()]
        lines += [f"{name:<18}  {seconds:>8.3f} s" for name, seconds in self._times()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the same table for a notebook."""
        times = ((name, f"{seconds:.3f} s", "") for name, seconds in self._times())
        return table_html(("", "bytes or time", "of it"), (*self._rows(), *times))

    def _rows(self) -> tuple[tuple[str, str, str], ...]:
        """Return name, size and details of each line about bytes."""
        rows = (
            ("saved by autograd", self.saved_bytes, ""),
            ("  kept by policy", self.skipped_bytes, _listed(self.skipped, str)),
            ("  duplicates", self.deduplicated_bytes, ""),
            ("  offloaded", self.offloaded_bytes, _listed(self.offloaded_by_dtype, format_size)),
            ("  recomputed", self.replayed_bytes, ""),
            ("  not accepted", self.kept_bytes, _listed(self.kept, str)),
            (
                "stored in the pool",
                self.stored_bytes,
                _joined(f"ratio {self.ratio:.2f}", _listed(self.stored_by_mode, format_size)),
            ),
        )
        return tuple((name, format_size(size), more) for name, size, more in rows)

    def _times(self) -> tuple[tuple[str, float], ...]:
        """Return the seconds that training threads spent, by activity."""
        return (
            ("storing", self.store_seconds),
            ("waiting to restore", self.restore_wait_seconds),
            ("recomputing", self.replay_seconds),
        )

    def __reduce__(self) -> tuple[type[OffloadStats], tuple[object, ...]]:
        """Pickle and copy with plain mappings: a MappingProxyType supports neither."""
        values = (getattr(self, item.name) for item in fields(self))
        plain = (dict(value) if isinstance(value, Mapping) else value for value in values)
        return OffloadStats, tuple(plain)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, dict):
                object.__setattr__(self, item.name, MappingProxyType(value))


class KeptTotals(NamedTuple):
    """Totals, and the bytes that were kept, by reason."""

    stats: OffloadStats
    skipped_bytes: Mapping[str, int]
    kept_bytes: Mapping[str, int]
    details: Mapping[str, str]
    """The daemon's latest message about ranges that it did not accept, by reason."""


class StatsRecorder:
    """Counts for one Offload, from any thread; the totals include the counts of its layers.

    Sums are computed when they are read, which is rare.
    """

    def __init__(self, whole: StatsRecorder | None = None) -> None:
        """Start at zero; for a layer's recorder, `whole` is the recorder of the Offload."""
        self._whole = whole
        self._lock = threading.RLock()  # protects all below; a signal handler may read them
        self._own = _Sums()
        self._details: dict[str, str] = {}
        self._layers: dict[str, StatsRecorder] = {}
        self.native: NativeCounts | None = None
        """Counts of compiled code; used in the Offload's recorder only."""
        self.arrived_bytes = 0
        """Bytes that arrived in the pool, of all layers; reading them for display needs no lock."""

    def of_layer(self, name: str) -> StatsRecorder:
        """Return a layer's recorder, which counts for the Offload too; self for an empty name."""
        if not name:
            return self
        layer = self._layers.get(name)
        if layer is None:
            with self._lock:
                layer = self._layers.setdefault(name, StatsRecorder(self))
        return layer

    def layers(self) -> dict[str, OffloadStats]:
        """Return the present totals of each layer, in the order in which layers were first seen."""
        self._add_native()
        with self._lock:
            layers = dict(self._layers)
        return {name: recorder.snapshot() for name, recorder in layers.items()}

    def skipped(self, nbytes: int, reason: str) -> None:
        """Count a saved tensor that the policy does not offload."""
        self._count("skipped", reason, nbytes)

    def kept_in_use(self, nbytes: int) -> None:
        """Count a saved range that is kept because something else references its memory."""
        self._count("kept_in_use", "in_use", nbytes)

    def undo_in_use(self, nbytes: int) -> None:
        """Undo `kept_in_use`: nothing else references the memory any more."""
        self._count("kept_in_use", "in_use", -nbytes, -1)

    def deduplicated(self, nbytes: int) -> None:
        """Count a duplicate: a saved tensor whose bytes were stored before."""
        self._count("deduplicated", "", nbytes)

    def saved(self, nbytes: int, seconds: float) -> None:
        """Count a saved tensor for which a new record is made, and the time that this took."""
        self._count("recorded", "", nbytes)
        self._add_seconds("store", seconds)

    def restored(self, seconds: float) -> None:
        """Count the time that a thread spent on restoring a tensor."""
        self._add_seconds("restore", seconds)

    def will_recompute(self, nbytes: int) -> None:
        """Count a saved tensor that will be recomputed, or that shares the storage of one."""
        self._count("replayed", "", nbytes)

    def replayed(self, seconds: float) -> None:
        """Count the time that a thread spent on recomputing a tensor."""
        self._add_seconds("replay", seconds)

    def offloaded(self, nbytes: int, dtype: torch.dtype, codec: str = "ancf") -> None:
        """Count a range that the daemon has accepted."""
        name = ENCODED if codec == ENCODED else dtype_name(dtype)
        self._count("offloaded", name, nbytes)

    def stored(self, nbytes: int, mode: str) -> None:
        """Count a chunk of `nbytes` that arrived in the pool."""
        self._count("stored", mode, nbytes)
        whole = self._whole or self
        with whole._lock:
            whole.arrived_bytes += nbytes

    def kept(self, nbytes: int, reason: str, detail: str = "") -> None:
        """Count a range that is kept with the client; `detail` is the daemon's explanation."""
        self._count("kept", reason, nbytes)
        whole = self._whole or self
        with whole._lock:
            whole._details[reason] = detail

    def ratio(self) -> float:
        """Return offloaded over stored bytes, at least 1.0; 1.0 before anything has been stored."""
        sums = self._sums()
        stored = sums.total("stored")
        return max(1.0, sums.total("offloaded") / stored) if stored else 1.0

    def kept_totals(self) -> KeptTotals:
        """Return the totals and the bytes kept so far."""
        sums = self._sums()
        with self._lock:
            details = dict(self._details)
        return KeptTotals(
            _totals(sums),
            _by_name(sums.nbytes, "skipped", "kept_in_use"),
            _by_name(sums.nbytes, "kept"),
            details,
        )

    def snapshot(self) -> OffloadStats:
        """Return the present totals."""
        return _totals(self._sums())

    def _count(self, what: str, name: str, nbytes: int, count: int = 1) -> None:
        with self._lock:
            self._own.counts[what, name] += count
            self._own.nbytes[what, name] += nbytes

    def _add_native(self) -> None:
        """Add the counts that compiled code has made since the last call."""
        if self.native is None:
            return
        counted, seconds = self.native.drain()
        for one in counted:
            self.of_layer(one.layer)._count(one.what, one.reason, one.nbytes, one.tensors)
        self._add_seconds("replay", seconds)

    def _add_seconds(self, on: str, seconds: float) -> None:
        with self._lock:
            self._own.seconds[on] += seconds

    def _sums(self) -> _Sums:
        """Return the sums of this recorder and its layers."""
        self._add_native()
        sums = _Sums()
        with self._lock:
            layers = list(self._layers.values())
            sums.add(self._own)
        for layer in layers:
            sums.add(layer._sums())
        return sums


_SAVED = ("skipped", "deduplicated", "recorded", "replayed")
"""The outcomes of a tensor that autograd saves: exactly one of these."""


class _Sums:
    """Counts and bytes by outcome and its reason, dtype or mode; and seconds by activity."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self.seconds = {"store": 0.0, "restore": 0.0, "replay": 0.0}

    def add(self, more: _Sums) -> None:
        self.counts.update(more.counts)
        self.nbytes.update(more.nbytes)
        for on, seconds in more.seconds.items():
            self.seconds[on] += seconds

    def total(self, *what: str) -> int:
        """Return the total bytes with these outcomes."""
        return sum(_by_name(self.nbytes, *what).values())


def _by_name(sums: Counter[tuple[str, str]], *what: str) -> dict[str, int]:
    """Return the sums of these outcomes by reason, dtype or mode, without those that are 0."""
    found: Counter[str] = Counter()
    for (of, name), number in sums.items():
        if of in what:
            found[name] += number
    return {name: total for name, total in found.items() if total}


def _totals(sums: _Sums) -> OffloadStats:
    return OffloadStats(
        saved_bytes=sums.total(*_SAVED),
        skipped_bytes=sums.total("skipped", "kept_in_use"),
        deduplicated_bytes=sums.total("deduplicated"),
        offloaded_bytes=sums.total("offloaded"),
        stored_bytes=sums.total("stored"),
        kept_bytes=sums.total("kept"),
        replayed_bytes=sums.total("replayed"),
        skipped=_by_name(sums.counts, "skipped", "kept_in_use"),
        kept=_by_name(sums.counts, "kept"),
        store_seconds=sums.seconds["store"],
        restore_wait_seconds=sums.seconds["restore"],
        replay_seconds=sums.seconds["replay"],
        offloaded_by_dtype=_by_name(sums.nbytes, "offloaded"),
        stored_by_mode=_by_name(sums.nbytes, "stored"),
    )


def _listed(counts: Mapping[str, int], shown: Callable[[int], str]) -> str:
    """Return the counts in one line, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{name} {shown(count)}" for name, count in ordered)


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
