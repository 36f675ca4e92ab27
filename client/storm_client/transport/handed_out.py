"""Restores whose memory is in use before the daemon has answered for them: streams wait for it.

They wait for the value of a counter. There are RESTORED_SLOTS of these, so a ticket is chosen whose
counter nobody waits for another value of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from storm_client.errors import StormError
from storm_client.transport.transfer import Incoming, Phase, Transfer
from stormd.protocol.timeline import RESTORED_SLOTS

__all__ = ["HandedOut"]

MOST_FAILED = 64
"""Backward passes remembered for what was not restored: who ended by an error never asks."""

MOST_HANDED_OUT = RESTORED_SLOTS // 2
"""Chunks that are in use before the daemon has answered for them."""


class HandedOut:
    """Of one session, whose lock protects it."""

    def __init__(self) -> None:
        """Start with nothing in use."""
        self.nbytes = 0
        """Of the chunks in use."""
        self.failed: dict[int, Transfer] = {}
        """By backward pass, the first that the daemon could not restore for it."""
        self.counters: dict[int, int] = {}
        """By the counter that says that it is there: the latest restore that was asked for."""
        self._transfers: dict[int, Transfer] = {}
        """By ticket, the oldest first."""
        self._shares_counters = False
        """Whether more restores were under way than there are counters: none can be trusted."""

    def __contains__(self, ticket: int) -> bool:
        """Tell whether the chunk of a ticket is in use."""
        return ticket in self._transfers

    def __len__(self) -> int:
        """Return how many are."""
        return len(self._transfers)

    def next_ticket(self, numbers: Iterator[int], pending: Collection[int]) -> int:
        """Return the number of a restore, whose counter no stream waits for another one by."""
        for _ in range(RESTORED_SLOTS):
            number = next(numbers)
            before = self.counters.get(number % RESTORED_SLOTS)
            if before not in pending:
                return number
        self._shares_counters = True
        while True:
            number = next(numbers)
            if self.counters[number % RESTORED_SLOTS] not in self._transfers:
                return number

    def may_take(self, incoming: Incoming) -> bool:
        """Tell whether streams can wait for all chunks that have not been written yet.

        Raises:
            CorruptBlob, ActivationLost: one that was answered for cannot be had.
        """
        for transfer in incoming.transfers.values():
            if transfer.error is not None:
                raise transfer.error
        count = len(self._transfers) + len(incoming.transfers)
        return count <= MOST_HANDED_OUT and not self._shares_counters

    def take_over(self, incoming: Incoming, user: int) -> list[int]:
        """Have a backward pass use what is asked for of a record; return the tickets."""
        tickets = []
        for index, transfer in list(incoming.transfers.items()):
            if transfer.phase is not Phase.REQUESTED:
                continue
            # All of it or nothing, for no call is between.
            transfer.phase = Phase.HANDED_OUT
            transfer.used_by = user
            del incoming.transfers[index]
            self._transfers[transfer.number] = transfer
            self.nbytes += transfer.nbytes
            tickets.append(transfer.number)
        return tickets

    def tells(self, transfer: Transfer) -> bool:
        """Tell whether a restore's counter is its own: always where a stream may wait for it."""
        return transfer.phase is Phase.HANDED_OUT or not self._shares_counters

    def is_used_by(self, user: int) -> bool:
        """Tell whether a backward pass has used what was not answered for."""
        return any(transfer.used_by == user for transfer in self._transfers.values())

    def in_storage(self, storage: torch.UntypedStorage) -> list[int]:
        """Return the tickets of what is still being written to a storage that is in use."""
        address = storage._cdata
        return [
            ticket
            for ticket, transfer in self._transfers.items()
            if isinstance(transfer.of, Incoming)
            and transfer.of.storage is not None
            and transfer.of.storage._cdata == address
        ]

    def settle(self, transfer: Transfer, phase: Phase) -> None:
        """Note what has become of a chunk that is in use."""
        # All of it or nothing, for no call is between.
        transfer.phase = phase
        self.nbytes -= transfer.nbytes
        del self._transfers[transfer.number]

    def fail(self, transfer: Transfer, error: StormError, phase: Phase) -> None:
        """Note why a chunk that is in use cannot be had."""
        transfer.error = error
        self.failed.setdefault(transfer.used_by, transfer)
        if len(self.failed) > MOST_FAILED:
            self.failed.pop(next(iter(self.failed)))
        self.settle(transfer, phase)

    def fail_all(self, error: StormError) -> list[int]:
        """Give up what is in use and was not answered for; return the tickets."""
        tickets = list(self._transfers)
        for ticket in tickets:
            self.fail(self._transfers[ticket], error, Phase.DROPPED)
        return tickets

    def clear(self) -> None:
        """Forget all: no answer will come any more."""
        self._transfers.clear()
        self.nbytes = 0

    def assert_invariants(self, pending: dict[int, Transfer]) -> None:
        """Check what is in use against what was asked for, and the counts and counters."""
        handed = [one for one in pending.values() if one.phase is Phase.HANDED_OUT]
        assert handed == list(self._transfers.values())
        assert self.nbytes == sum(one.nbytes for one in handed)
        for ticket in self._transfers:
            assert self.counters[ticket % RESTORED_SLOTS] == ticket
