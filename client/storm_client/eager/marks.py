"""Moments of a step, and the time between them, by a GPU's clock or the host's."""

from __future__ import annotations

import time

import torch

__all__ = ["Mark", "Span"]

_current_stream = torch._C._accelerator_getStream


class Mark:
    """A moment: when the GPU reaches it on this thread's stream, or the present on the host.

    Only moments of one device can be compared, so the later one is made from the earlier.
    """

    __slots__ = ("_at", "_device")

    def __init__(self, device: torch.device | None) -> None:
        """Mark the present on `device`; None stands for the host."""
        self._device = device
        self._at: torch.Event | float = time.perf_counter()
        if device is not None:  # by the C++ types: the thread makes one in each step
            self._at = torch.Event(device, enable_timing=True)
            self._at.record(_current_stream(device.index))

    @property
    def device(self) -> torch.device | None:
        """The GPU; None for the host."""
        return self._device

    @property
    def is_reached(self) -> bool:
        """Whether the device has reached this moment."""
        return isinstance(self._at, float) or self._at.query()

    def until_now(self) -> Span:
        """Return the time span from this moment until the present on the same device."""
        return Span(self, Mark(self._device))

    def seconds_until(self, later: Mark) -> float:
        """Return the seconds until `later`, waiting for the device to reach it."""
        if isinstance(self._at, float):
            assert isinstance(later._at, float)
            return later._at - self._at
        assert not isinstance(later._at, float)
        later._at.synchronize()
        return self._at.elapsed_time(later._at) / 1e3


class Span:
    """The time between two marks, as a function without arguments that waits for the second."""

    __slots__ = ("_begin", "end")

    def __init__(self, begin: Mark, end: Mark) -> None:
        """Span two marks of one device; see `Mark.until_now`."""
        self._begin = begin
        self.end = end
        """The second mark."""

    @property
    def is_known(self) -> bool:
        """Whether the second mark has been reached."""
        return self.end.is_reached

    def __call__(self) -> float:
        """Return the seconds."""
        return self._begin.seconds_until(self.end)
