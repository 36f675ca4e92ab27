"""The data paths of the client, one module a kind of device.

A lane moves bytes between tensors and the staging area that it shares with the daemon, and knows
what orders those moves: the host's program order on the cpu lane, streams and the timeline page
on the cuda lane. It decides nothing: what is stored when, which range of the staging area is
used, and who waits for which message is the session's business.

What stays true: a range handed back by the session may be handed out again at once; where a
device works asynchronously, the lane orders the new use behind the old one.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Lane"]


class Lane(Protocol):
    """What the session needs from a data path. All methods may be called from several threads.

    The staging area is `staging_bytes` long; offsets into it are multiples of 64. Bytes are
    passed as contiguous one-dimensional uint8 tensors on `device`.

    The order of one part on its way out: `stage` -> Store(sequence) is sent -> Stored arrives ->
    the range is free. On its way back: `grant` -> Restore(sequence) is sent -> (Restored arrives,
    waited for only if `host_waits`) -> `unstage` with the same sequence -> the range is free.
    """

    device: torch.device
    staging_bytes: int
    host_waits: bool
    """Whether the calling thread must have seen Restored before `unstage` may be called."""

    def capturing(self) -> bool:
        """Tell whether the current stream is being captured into a graph: nothing may be stored."""
        ...

    def stage(self, source: torch.Tensor, offset: int) -> int:
        """Copy `source` into the staging area at `offset`; return the Store's sequence number.

        The caller keeps `source` alive until it returns, no longer.
        """
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor of `nbytes` to restore into."""
        ...

    def grant(self) -> int:
        """Return the sequence number of a Restore whose range the daemon may overwrite."""
        ...

    def unstage(self, offset: int, destination: torch.Tensor, sequence: int) -> None:
        """Copy a restored part from `offset` into `destination`, in order before later uses."""
        ...

    def poison(self) -> None:
        """Release every wait on the daemon's counters: the daemon is dead. Called once, at most."""
        ...

    def close(self) -> None:
        """Give up the staging area. Calling it twice is fine."""
        ...
