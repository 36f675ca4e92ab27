"""The cpu lane: tensors in host memory, staged through shared memory.

What stays true: every copy is finished when the method returns, so program order and messages
are all the order there is, and sequence numbers stay 0.
"""

from __future__ import annotations

import mmap

import torch

from storm_client.errors import DaemonUnavailable
from storm_client.lanes import LaneHello, Request, Slot
from storm_client.staging import StagingSpace
from stormd.protocol import Welcome

__all__ = ["CpuLane"]

STAGING = 0
"""The segment that is the staging area; it exists from Welcome on."""


class CpuLane:
    """Copies between host tensors and a memory file shared with the daemon.

    Copies go through torch, which releases the interpreter lock meanwhile.
    """

    def __init__(self) -> None:
        """Describe the lane; attach gives it its memory."""
        self.device = torch.device("cpu")
        self.hello = LaneHello(device="cpu")
        self.staging_bytes = 0
        self._space = StagingSpace(0)
        self._area: torch.Tensor | None = None

    def attach(self, welcome: Welcome, descriptors: list[int], request: Request) -> None:  # noqa: ARG002 - no message is needed here
        """Map the staging area, the second descriptor.

        Raises:
            DaemonUnavailable: the daemon shared no staging area.
        """
        if len(descriptors) < 2:
            raise DaemonUnavailable(
                f"the daemon shared {len(descriptors)} of 2 memory files with this cpu session; "
                "look for the reason in its log"
            )
        self.staging_bytes = welcome.staging_bytes
        memory = mmap.mmap(descriptors[1], welcome.staging_bytes)
        self._area = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        self._space = StagingSpace(welcome.staging_bytes)

    def capturing(self) -> bool:
        """Return False: there are no graphs to capture on the host."""
        return False

    def reserve(self, nbytes: int) -> Slot | None:
        """Return a slot of `nbytes`, None where there is no room now."""
        offset = self._space.allocate(nbytes)
        return None if offset is None else Slot(STAGING, offset, nbytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back."""
        self._space.free(slot.offset)

    def publish(self, slot: Slot) -> int:  # noqa: ARG002 - what was copied is there
        """Return 0: the host's memory is in order by itself."""
        return 0

    def stage(self, source: torch.Tensor, slot: Slot) -> None:
        """Copy `source` into the slot; the bytes are there on return."""
        self._bytes(slot).copy_(source)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor in host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def unstage(self, slot: Slot, destination: torch.Tensor) -> None:
        """Copy the slot's bytes into `destination`; they are there on return."""
        destination.copy_(self._bytes(slot))

    def use(self, restored: torch.UntypedStorage) -> None:
        """Do nothing: what was copied is there."""

    def poison(self) -> None:
        """Do nothing: no thread waits on a counter here."""

    def close(self) -> None:
        """Unmap the staging area as soon as no copy uses it any more."""
        self._area = None

    def _bytes(self, slot: Slot) -> torch.Tensor:
        assert self._area is not None, "the lane is closed"
        return self._area[slot.offset : slot.offset + slot.nbytes]
