"""Restores whose memory is in use before the daemon has answered: streams wait for the bytes.

A stream waits for the value of a counter. There are RESTORED_SLOTS counters, so a ticket is chosen
such that nobody waits for another value of its counter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from storm_client.errors import StormError
from storm_client.transport.transfer import Incoming, Phase, Transfer
from stormd.protocol.timeline import RESTORED_SLOTS

__all__ = ["HandedOut"]

MAX_FAILED = 64
"""Backward passes remembered as failed: a pass that an error has ended never asks."""

MAX_HANDED_OUT = RESTORED_SLOTS // 2
"""Limit for the number of chunks in use before the daemon has answered for them."""


class HandedOut:
    """The handed-out restores of one session, whose lock protects them."""

    def __init__(self) -> None:
        """Start without any in use."""
        self.nbytes = 0
        """Total bytes of the chunks in use."""
        self.failed: dict[int, Transfer] = {}
        """By backward pass: the first chunk that the daemon could not restore for it."""
        self.counters: dict[int, int] = {}
        """By counter: the number of the latest restore that uses it."""
        self._transfers: dict[int, Transfer] = {}
        """By ticket, in the order in which they were handed out."""
        self._shares_counters = False
        """Whether more restores were in flight than there are counters: then none can be
        trusted."""

    def __contains__(self, ticket: int) -> bool:
        """Return whether the chunk of a ticket is in use."""
        return ticket in self._transfers

    def __len__(self) -> int:
        """Return the number of chunks in use."""
        return len(self._transfers)

    def next_ticket(self, numbers: Iterator[int], pending: Collection[int]) -> int:
        """Return a number for a restore; no stream waits for another restore by its counter."""
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

    def can_hand_out(self, incoming: Incoming) -> bool:
        """Return whether streams can wait for all chunks that are not written yet.

        Raises:
            CorruptBlob, ActivationLost: a chunk was answered and cannot be restored.
        """
        for transfer in incoming.transfers.values():
            if transfer.error is not None:
                raise transfer.error
        count = len(self._transfers) + len(incoming.transfers)
        return count <= MAX_HANDED_OUT and not self._shares_counters

    def hand_out(self, incoming: Incoming, user: int) -> list[int]:
        """Let a backward pass use a record's requested chunks; return their tickets."""
        tickets = []
        for index, transfer in list(incoming.transfers.items()):
            if transfer.phase is not Phase.REQUESTED:
                continue
            # No call is between these statements: either all are done or none.
            transfer.phase = Phase.HANDED_OUT
            transfer.used_by = user
            del incoming.transfers[index]
            self._transfers[transfer.number] = transfer
            self.nbytes += transfer.nbytes
            tickets.append(transfer.number)
        return tickets

    def has_own_counter(self, transfer: Transfer) -> bool:
        """Return whether a restore's counter is its own: always if a stream may wait for it."""
        return transfer.phase is Phase.HANDED_OUT or not self._shares_counters

    def is_used_by(self, user: int) -> bool:
        """Return whether a backward pass uses a chunk that the daemon has not answered for."""
        return any(transfer.used_by == user for transfer in self._transfers.values())

    def in_storage(self, storage: torch.UntypedStorage) -> list[int]:
        """Return the tickets of chunks that are still being written to a storage in use."""
        address = storage._cdata
        return [
            ticket
            for ticket, transfer in self._transfers.items()
            if isinstance(transfer.of, Incoming)
            and transfer.of.storage is not None
            and transfer.of.storage._cdata == address
        ]

    def finish(self, transfer: Transfer, phase: Phase) -> None:
        """Note the final phase of a chunk in use."""
        # No call is between these statements: either all are done or none.
        transfer.phase = phase
        self.nbytes -= transfer.nbytes
        del self._transfers[transfer.number]

    def fail(self, transfer: Transfer, error: StormError, phase: Phase) -> None:
        """Note why a chunk in use cannot be restored."""
        transfer.error = error
        self.failed.setdefault(transfer.used_by, transfer)
        if len(self.failed) > MAX_FAILED:
            self.failed.pop(next(iter(self.failed)))
        self.finish(transfer, phase)

    def fail_all(self, error: StormError) -> list[int]:
        """Fail all chunks in use that were not answered for; return their tickets."""
        tickets = list(self._transfers)
        for ticket in tickets:
            self.fail(self._transfers[ticket], error, Phase.DROPPED)
        return tickets

    def clear(self) -> None:
        """Forget all chunks: no answer will come any more."""
        self._transfers.clear()
        self.nbytes = 0

    def assert_invariants(self, pending: dict[int, Transfer]) -> None:
        """Check the chunks in use against the requests, the counts and the counters."""
        handed = {ticket: one for ticket, one in pending.items() if one.phase is Phase.HANDED_OUT}
        assert handed == self._transfers
        assert self.nbytes == sum(one.nbytes for one in handed.values())
        for ticket in self._transfers:
            assert self.counters[ticket % RESTORED_SLOTS] == ticket
