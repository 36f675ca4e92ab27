"""Large values of a step that may be read as soon as they have been made.

They leave by the plan. Others may still hold them, so they leave later; but their bytes are read at
once where a step has shown that nobody writes to them until then without that being counted.
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
"""What leaves as it was made has as many. A smaller one is on the link for less than the device
takes for what comes before it would leave anyway, and noting it costs the training thread."""


class EarlyReads:
    """Those of one step."""

    def __init__(self, step: StepRecord, pins: Pins, hooks: SaveHooks, *, is_on: bool) -> None:
        """Publish by `hooks` what was made, if that `is_on`; `pins` hold its memory."""
        self._step, self._pins, self._hooks, self._is_on = step, pins, hooks, is_on
        self._ready: dict[int, Ready] = {}
        self.tries = False
        """Whether it is being found out of some whether they are written to."""

    def of(self, storage: torch.UntypedStorage) -> Ready | None:
        """Return when what lies in a storage was made; None if it is not read early."""
        return self._ready.get(storage._cdata)

    def looks_at(self, output: torch.Tensor) -> bool:
        """Tell whether a result is large enough."""
        return output.nbytes >= LARGE_BYTES

    def may_leave(self, number: int, nbytes: int) -> bool:
        """Tell whether a step has shown that nobody writes to so large a value, uncounted."""
        signature = self._step.signature
        if signature is None or not self._is_on:
            return False
        evidence = signature.evidence
        return evidence.unchanged.holds(number, nbytes) and number not in evidence.changed

    def made(self, number: int, output: torch.Tensor) -> bool:
        """Note from when on the bytes of a value that will leave are there; tell if that counts."""
        signature = self._step.signature
        if signature is None or not (self._is_on and self.looks_at(output)):
            return False
        evidence = signature.evidence
        if number in evidence.changed:
            return False
        sequence = self._hooks.publish(output)
        if not sequence:
            return False
        storage, trial = output.untyped_storage(), None
        if not evidence.unchanged.holds(number, storage.nbytes()):
            if not evidence.goes_on_trying(number):
                evidence.changed.add(number)
                return False
            self.tries, sequence = True, 0
            trial = UnchangedTrial(signature, number, checksum(storage), storage.nbytes())
        self._pins.add(storage)
        ready = self._ready[storage._cdata] = Ready(SnapshotProof(output), sequence, trial)
        self._hooks.is_ready(output, ready)
        return True

    def overwritten(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has got other bytes, which no version tells."""
        self._ready.pop(storage._cdata, None)

    def forget(self) -> None:
        """Let go of all: the step has ended."""
        self._ready.clear()
