"""The cpu lane: tensors in host memory, staged through shared memory.

What stays true: every copy is finished when the method returns, so program order and messages
are all the order there is, and sequence numbers stay 0.
"""

from __future__ import annotations

import mmap

import torch

__all__ = ["CpuLane"]


class CpuLane:
    """Copies between host tensors and a shared memory file.

    Copies go through torch, which releases the interpreter lock meanwhile.
    """

    host_waits = True

    def __init__(self, descriptor: int, staging_bytes: int) -> None:
        """Map `staging_bytes` of `descriptor`, which stays the caller's to close."""
        self.device = torch.device("cpu")
        self.staging_bytes = staging_bytes
        self._memory = mmap.mmap(descriptor, staging_bytes)
        self._area: torch.Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)

    def capturing(self) -> bool:
        """Return False: there are no graphs to capture on the host."""
        return False

    def stage(self, source: torch.Tensor, offset: int) -> int:
        """Copy `source` to `offset`; the bytes are there on return."""
        self._range(offset, source.numel()).copy_(source)
        return 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def grant(self) -> int:
        """Return 0: a range that is free is free for the daemon as well."""
        return 0

    def unstage(self, offset: int, destination: torch.Tensor, sequence: int) -> None:  # noqa: ARG002 - program order is enough
        """Copy the part at `offset` into `destination`."""
        destination.copy_(self._range(offset, destination.numel()))

    def poison(self) -> None:
        """Do nothing: no thread waits on a counter here."""

    def close(self) -> None:
        """Unmap the staging area."""
        if self._area is None:
            return
        self._area = None
        self._memory.close()

    def _range(self, offset: int, nbytes: int) -> torch.Tensor:
        assert self._area is not None, "the lane is closed"
        return self._area[offset : offset + nbytes]
