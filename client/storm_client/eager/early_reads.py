"""Large values of a step whose bytes may be read as soon as they have been made.

The plan offloads these values. Others may still hold them, so their memory is freed later. But
their bytes are read at once where a step has shown that nobody writes to them uncounted until then.
"""

from __future__ import annotations

from typing import Final

import torch

from storm_client.eager.bits import checksum
from storm_client.eager.proofs import UnchangedTrial
from storm_client.eager.recognition import StepRecord
from storm_client.eager.recompute import Pins
from storm_client.eager.values import SaveHooks
from storm_client.saved.snapshots import Ready, SnapshotProof

__all__ = ["EarlyReads"]

LARGE_BYTES: Final = 16 << 20
"""Minimum size of a value that is read early. For a smaller one an early read gains nothing: its
transfer takes less time than the device computes before the value would be offloaded anyway, and
recording it costs time on the training thread."""


class EarlyReads:
    """The early reads of one step."""

    def __init__(self, step: StepRecord, pins: Pins, hooks: SaveHooks, *, is_on: bool) -> None:
        """Publish values by `hooks` when they are made, if `is_on`; `pins` know their storages."""
        self._step, self._pins, self._hooks, self._is_on = step, pins, hooks, is_on
        self._ready: dict[int, Ready] = {}
        self.tries = False
        """Whether the step tries whether some values are written to uncounted."""

    def of(self, storage: torch.UntypedStorage) -> Ready | None:
        """Return the `Ready` record of a storage's value; None if it is not read early."""
        return self._ready.get(storage._cdata)

    def looks_at(self, output: torch.Tensor) -> bool:
        """Return whether a result is large enough for an early read."""
        return output.nbytes >= LARGE_BYTES

    def may_offload_early(self, number: int, nbytes: int) -> bool:
        """Return whether a step has shown that nobody writes uncounted to a value of `nbytes`."""
        signature = self._step.signature
        if signature is None or not self._is_on:
            return False
        evidence = signature.evidence
        return evidence.unchanged.holds(number, nbytes) and number not in evidence.changed

    def made(self, number: int, output: torch.Tensor) -> bool:
        """Publish that a value to be offloaded has been made; return whether it is tracked."""
        signature = self._step.signature
        if signature is None or not (self._is_on and self.looks_at(output)):
            return False
        evidence = signature.evidence
        if number in evidence.changed:
            return False
        sequence = self._hooks.publish_ready(output)
        if not sequence:
            return False
        storage, trial = output.untyped_storage(), None
        if not evidence.unchanged.holds(number, storage.nbytes()):
            if not evidence.count_trial(number):
                evidence.changed.add(number)
                return False
            self.tries, sequence = True, 0
            trial = UnchangedTrial(signature, number, checksum(storage), storage.nbytes())
        self._pins.add(storage)
        ready = self._ready[storage._cdata] = Ready(SnapshotProof(output), sequence, trial)
        self._hooks.offload_when_ready(output, ready)
        return True

    def overwritten(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage was modified without a version counting it."""
        self._ready.pop(storage._cdata, None)

    def forget(self) -> None:
        """Forget all values: the step has ended."""
        self._ready.clear()
