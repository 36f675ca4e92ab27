"""How much device memory may hold saved values, and the transfers of one session."""

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
"""Share of a device's free memory that kept values may use; the rest allows for variation."""

MOST_BYTES = 5 << 28
"""The most that the limit of held sources is by a share: what a PCIe 5 link moves in the time of a
long kernel."""

HELD_SHARE = 1 / 8
"""Share of the bytes that the largest of the latest forward passes stored. If little is offloaded,
holding all of it would free nothing."""

LATEST = 8
"""Forward passes that count. Learning steps store everything, steps of the final plan much less."""

UNREAD_SHARE = 1 / 4
"""The same share for sources that are released before they are read. They take no client memory,
but memory that the pool reserves. With less, the host runs so little ahead that the device
idles."""

LAST_BYTES = 9 << 27
LAST_SHARE = 1 / 9
"""Limits of the last saved values of a forward pass that may be kept: in bytes, and as a share of
all that the pass saves. The backward pass needs them first, and even if they were offloaded, their
sources would still be on the device when the backward pass begins."""

LARGEST = 3
"""How many of the largest tensors may be held, so that the link has work while a long kernel runs
whose result is not stored."""

LARGE_SHARE = 1 / 2
"""Share of the stored bytes that these may be: where few large tensors are stored, as an LSTM does,
holding them all would free nothing. One may always be held."""

TURN_BYTES = 1 << 28
"""Least limit of held sources at the end of a forward pass. With less, the training thread waits
for the link before it returns the loss, and the device waits for the thread."""

MIN_BYTES = 1 << 26
"""Even with little memory, some tensors must be in flight to keep the link busy. It is the limit
until a forward pass has shown how much it stores: a model may not fit with more."""


class DeviceWindow:
    """How much device memory one session's transfers may take; the session's lock protects it.

    One limit bounds the sources that are held after a store, together with the values that are
    prefetched. If no plan knows a step's peak, prefetches may take half of the memory that the step
    used before and that is free again. Both stay below the ceiling, which is halved when the device
    runs out of memory.
    """

    def __init__(self, ceiling: int) -> None:
        """Never allow more than `ceiling` bytes."""
        self._ceiling = ceiling
        self.limit = min(MIN_BYTES, self._ceiling)
        """Bytes of sources that may be held after they were stored."""
        self.unread = min(MOST_BYTES, self._ceiling)
        """Bytes of sources that may be released before they were read."""
        self.limit_at_forward_end: int | None = None
        """Bytes of sources that may be held when a forward pass ends; None for the full limit."""
        self._largest = self._known_largest = 0
        self._pass_bytes = 0
        self._passes: deque[tuple[int, int]] = deque(maxlen=LATEST)
        """Bytes that each of the latest passes stored, and its largest tensor."""

    def record_store(self, nbytes: int) -> None:
        """Note the size of a tensor that is stored in place."""
        self._largest = max(self._largest, nbytes)
        self._pass_bytes += nbytes
        if nbytes > self._known_largest:
            self.limit = min(self._ceiling, max(self.limit, LARGEST * nbytes))
            self.unread = max(self.unread, self.limit)

    def on_backward_begin(self) -> None:
        """Note that a restore begins: the stores since the last call were one forward pass."""
        self._passes.append((self._pass_bytes, self._largest))
        self._pass_bytes = self._largest = 0
        self._known_largest = max(largest for _, largest in self._passes)
        self.limit = self._share_of_passes(HELD_SHARE)
        self.unread = self._share_of_passes(UNREAD_SHARE)

    def may_hold(self) -> int:
        """Return how many bytes of sources may be held now.

        Sources that are held when a forward pass ends are in memory together with the loss. So the
        limit shrinks as the pass approaches the point where the last pass ended.
        """
        if self.limit_at_forward_end is None:
            return self.limit
        latest, _ = self._passes[-1] if self._passes else (0, 0)
        to_come = max(0, latest - self._pass_bytes)
        return min(self.limit, max(self.limit_at_forward_end, TURN_BYTES) + to_come)

    def prefetch_limit(self, headroom: int, held: int) -> int:
        """Return how many bytes may be prefetched.

        `headroom` is the peak of allocated bytes less the bytes allocated now, 0 if it does not
        count. `held` is the bytes of sources that are held although they were stored. When a
        backward pass begins, held and prefetched values would be in memory at once, which is more
        than without offload.
        """
        beside_held = max(self.limit - held, min(self.limit, MIN_BYTES))
        spare = headroom // 2 if self.counts_headroom else 0
        return min(self._ceiling, max(beside_held, spare))

    @property
    def counts_headroom(self) -> bool:
        """Whether prefetches may use memory that the step used before.

        With `limit_at_forward_end` they do not: the plan counts on this in-flight limit. A
        prefetched value stays in memory until its use, also at the step's peak, and would raise the
        peak that the next step takes its headroom from.
        """
        return self.limit_at_forward_end is None

    def shrink(self) -> None:
        """Halve the ceiling from now on: the device has run out of memory."""
        self._ceiling = max(min(MIN_BYTES, self._ceiling), self._ceiling // 2)
        self.limit = min(self.limit, self._ceiling)
        self.unread = min(self.unread, self._ceiling)

    def _share_of_passes(self, share: float) -> int:
        stored, largest = map(max, zip(*self._passes, strict=True))
        return min(self._ceiling, _share_of(share, stored, largest))


def _share_of(share: float, stored: int, largest: int) -> int:
    """Return a share of the bytes that a forward pass stores, within limits."""
    few = max(largest, min(LARGEST * largest, int(LARGE_SHARE * stored)))
    return max(min(MOST_BYTES, max(MIN_BYTES, int(share * stored))), few)


def in_flight_bytes(sizes: Sequence[int]) -> int:
    """Return the most bytes in flight in a step that stores tensors of these sizes."""
    stored = sum(sizes)
    return min(stored, max(TURN_BYTES, _share_of(HELD_SHARE, stored, max(sizes, default=0))))


def last_bytes(saved: int) -> int:
    """Return how many bytes of the last saved values may be kept, if a pass saves `saved` bytes."""
    return min(LAST_BYTES, int(LAST_SHARE * saved))


def device_bytes(devices: Iterable[torch.device]) -> int:
    """Return the total memory of some GPUs, in bytes."""
    return sum(int(torch.cuda.get_device_properties(device).total_memory) for device in devices)


def free_bytes(devices: Iterable[torch.device]) -> int:
    """Return the bytes free at the peak of the fullest of some GPUs, less a margin for variation.

    0 if there are no GPUs.
    """
    return min(map(_free_bytes, devices), default=0)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(FIT_SHARE * max(0, free + unused))


def give_back_unused(devices: Iterable[torch.device]) -> None:
    """Make PyTorch return its unused cached GPU memory to the device.

    Do nothing while a GPU captures a graph. Learning steps need other block sizes than later steps:
    their cached blocks would not fit later requests, and stay cached until the process ends.
    """
    if not any(map(is_capturing, devices)):
        torch.cuda.empty_cache()
