"""How much device memory there is for what is saved, and for the transfers of one session."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from storm_client.devices import is_capturing

__all__ = [
    "DeviceWindow",
    "device_bytes",
    "free_bytes",
    "give_back_unused",
    "in_flight_bytes",
    "last_bytes",
]

FIT_SHARE = 0.9
"""Of what a device has free, for what may stay on it; the rest is for what varies."""

START_BYTES = 5 << 28
"""What may be held to begin with: what a PCIe 5 link moves in the time of a long kernel."""

HELD_SHARE = 1 / 8
"""Of what the fullest of the latest forward passes has stored: where little leaves, holding all of
it would free nothing."""

LATEST = 8
"""So many of them count. Steps that learn store all, and those of the plan that stays much less."""

UNREAD_SHARE = 1 / 4
"""The same of what is given up before it is read. That takes no memory of ours, but room that the
pool promises; with less the host is so little ahead that the device runs out of work."""

LAST_BYTES = 9 << 27
LAST_SHARE = 1 / 9
"""How much of what a forward pass saves last may stay, in bytes and of all that it saves. That is
asked for first, and what has just been sent lies there until the backward pass begins, too."""

LARGEST = 3
"""How many of the largest tensors may be held, so that the link has work while a long kernel runs
that makes nothing to store."""

TURN_BYTES = 1 << 28
"""However little may be held where a forward pass ends: with less the thread waits for the link
before it hands over the loss, and the device for the thread."""

LEAST_BYTES = 1 << 26
"""However little memory there is, some tensors must be in flight for the link to be busy."""


class DeviceWindow:
    """How much device memory one session's offloading may take; the session's lock protects it.

    One limit bounds what is held after a store, and together with that what is brought back early.
    Where no plan says what a step takes at its fullest, that takes half of the memory that the step
    has used before and has free again. Both stay below the ceiling, and running out of memory
    halves them.
    """

    def __init__(self, ceiling: int) -> None:
        """Never choose more than `ceiling` bytes."""
        self._ceiling = ceiling
        self.limit = min(START_BYTES, self._ceiling)
        """Bytes of sources that may be held after they were stored."""
        self.unread = self.limit
        """Bytes of sources that may be given up before they were read."""
        self.at_turn: int | None = None
        """Bytes of sources that may be held when a forward pass ends; None for no fewer."""
        self._largest = 0
        self._pass_bytes = 0
        self._passes: deque[tuple[int, int]] = deque(maxlen=LATEST)
        """What the latest have stored, and the largest tensor of each."""

    def saw(self, nbytes: int) -> None:
        """Note the size of a tensor that is stored in place."""
        self._largest = max(self._largest, nbytes)
        self._pass_bytes += nbytes
        self.limit = min(self._ceiling, max(self.limit, LARGEST * nbytes))
        self.unread = max(self.unread, self.limit)

    def turned(self) -> None:
        """Note that something is brought back: what was stored since the last time was a pass."""
        self._passes.append((self._pass_bytes, self._largest))
        self._pass_bytes = self._largest = 0
        self.limit = self._part_of_passes(HELD_SHARE)
        self.unread = self._part_of_passes(UNREAD_SHARE)

    def may_hold(self) -> int:
        """Return how many bytes of sources may be held by now.

        What is held when a forward pass ends lies there beside the loss. So it shrinks as the pass
        comes to where the last one ended.
        """
        if self.at_turn is None:
            return self.limit
        latest, _ = self._passes[-1] if self._passes else (0, 0)
        to_come = max(0, latest - self._pass_bytes)
        return min(self.limit, max(self.at_turn, TURN_BYTES) + to_come)

    def ahead(self, headroom: int, held: int) -> int:
        """Return how many bytes may be brought back early.

        `headroom` is by how many bytes less is allocated now than was at the most, `held` what lies
        here though it was stored: when a backward pass begins both would be there at once, and more
        than without offload. With a limit for that moment there is no more in flight than the plan
        counts on: what is brought back then lies there until its use, also where the step is at its
        fullest, which would become the memory that the next has used before.
        """
        beside_held = max(self.limit - held, min(self.limit, LEAST_BYTES))
        spare = headroom // 2 if self.at_turn is None else 0
        return min(self._ceiling, max(beside_held, spare))

    def shrink(self) -> None:
        """Take half from now on: the device has run out of memory."""
        self._ceiling = max(min(LEAST_BYTES, self._ceiling), self._ceiling // 2)
        self.limit = min(self.limit, self._ceiling)
        self.unread = min(self.unread, self._ceiling)

    def _part_of_passes(self, share: float) -> int:
        stored, largest = map(max, zip(*self._passes, strict=True))
        return min(self._ceiling, _part(share, stored, largest))


def _part(share: float, stored: int, largest: int) -> int:
    """Return a share of what a forward pass stores, within limits."""
    return max(min(START_BYTES, max(LEAST_BYTES, int(share * stored))), LARGEST * largest)


def in_flight_bytes(sizes: Sequence[int]) -> int:
    """Return how much is in flight at the most in a step that stores tensors of these sizes."""
    stored = sum(sizes)
    return min(stored, max(TURN_BYTES, _part(HELD_SHARE, stored, max(sizes, default=0))))


def last_bytes(saved: int) -> int:
    """Return how much may stay of what is saved last, of `saved` bytes."""
    return min(LAST_BYTES, int(LAST_SHARE * saved))


def device_bytes(devices: Iterable[torch.device]) -> int:
    """Return how much memory some GPUs have in all."""
    return sum(int(torch.cuda.get_device_properties(device).total_memory) for device in devices)


def free_bytes(devices: Iterable[torch.device]) -> int:
    """Return what each of some GPUs had free at its fullest, less what is left for what varies.

    0 where there is none.
    """
    return min(map(_free_bytes, devices), default=0)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(FIT_SHARE * max(0, free + unused))


def give_back_unused(devices: Iterable[torch.device]) -> None:
    """Have PyTorch give back what it keeps of GPUs' memory and does not use.

    Not while one captures a graph. Steps that learn need other memory than those that follow, in
    other sizes: what they leave behind would not fit, and stay until the process ends.
    """
    if not any(map(is_capturing, devices)):
        torch.cuda.empty_cache()
