"""The transfers of a session, driven by random events: nothing of it needs a daemon or a device."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from storm_client.errors import ActivationLost, CorruptBlob, StormError
from storm_client.lanes import Mapped, Route, Slot, Staged
from storm_client.planner import DeviceWindow
from storm_client.saved.ranges import Part, RangePhase, StoredRange
from storm_client.transport.transfer import Incoming, Outgoing, Phase, Transfer
from storm_client.transport.transfers import Transfers
from support.records import record_of

from stormd.protocol import (
    Admitted,
    Envelope,
    Failed,
    PassOver,
    Pong,
    Rejected,
    Restored,
    RestoredParts,
    Store,
    Stored,
    pack,
)

STAGING = 1024
PART = 256


def transfers_of(
    *, keeps_stored: bool = False, window: int = 1 << 30, staging_bytes: int = STAGING
) -> Transfers:
    return Transfers(
        count(1),
        [],
        staging_bytes=staging_bytes,
        part_bytes=PART,
        window=DeviceWindow(window),
        keeps_stored=keeps_stored,
    )


def record(nbytes: int = 2 * PART) -> StoredRange:
    return record_of(torch.zeros(nbytes, dtype=torch.uint8))


def send_all(transfers: Transfers, one: StoredRange) -> tuple[Outgoing, list[Transfer]]:
    """Send a record through the staging area, as far as there is room."""
    out = transfers.stores.begin_store(one)
    sent = []
    for part in transfers.stores.split(one.nbytes):
        slot = transfers.reserve(len(part))
        sent.append(send(transfers, out, part, Staged(slot.offset), slot))
    return out, sent


def send(
    transfers: Transfers, out: Outgoing, part: range, route: Route, slot: Slot | None = None
) -> Transfer:
    transfer = transfers.stores.store(out, part, route, 0, slot)
    message = transfers._outbox[-1].message
    assert isinstance(message, Store)
    assert (message.segment, message.offset) == (route.segment, route.offset)
    assert (message.entry, message.nbytes) == (transfer.number, len(part))
    return transfer


def stored(transfer: Transfer) -> Stored:
    return Stored(transfer.number, 10, "window")


def free_bytes(transfers: Transfers) -> int:
    return transfers._space.free_bytes


# --- out ----------------------------------------------------------------------------------------


def test_an_answer_may_be_handled_twice() -> None:
    """A handler that an interrupt ended is called again."""
    transfers, one = transfers_of(), record()
    _, (first, second) = send_all(transfers, one)
    for message in (Admitted(first.number), stored(first), Admitted(second.number)):
        assert one.source is not None
        transfers.on_reply(0, message)
        transfers.on_reply(0, message)
    assert (one.source, one.phase) == (None, RangePhase.OFFLOADED)
    assert one.stats.snapshot().stored_bytes == 10


# --- back ---------------------------------------------------------------------------------------


def away(transfers: Transfers, nbytes: int = 2 * PART) -> StoredRange:
    """Return a record that is with the daemon alone."""
    one = record(nbytes)
    for transfer in send_all(transfers, one)[1]:
        transfers.on_reply(0, Admitted(transfer.number))
        transfers.on_reply(0, stored(transfer))
    return one


def test_without_a_staging_area_nothing_is_prefetched_into_it() -> None:
    transfers, wanted = transfers_of(staging_bytes=0), record()
    parts = [Part(number, begin, PART) for number, begin in ((101, 0), (102, PART))]
    assert not transfers.has_staging
    assert not transfers.has_room_to_prefetch
    assert transfers.reserve(PART) is None
    transfers.open_staging(STAGING)
    assert transfers.has_staging
    assert transfers.has_room_to_prefetch
    assert transfers.request_ahead(transfers.begin_staged(wanted.key, parts), 0, 1)
    transfers.assert_invariants()


def test_memory_counts_as_early_until_somebody_waits_for_it() -> None:
    transfers = transfers_of()
    one, other = away(transfers), away(transfers)
    limit = transfers.window.limit = 1 << 40
    transfers.held.hold(transfers.stores.begin_store(record()))
    for each in (one, other):
        storage = torch.UntypedStorage(each.nbytes)
        incoming = transfers.begin_in_place(each.key, each.parts, storage, is_demanded=False)
        for index in range(2):
            transfers.restore(incoming, index, Mapped(1, 0), 1)
    assert transfers.window.limit < limit, "a backward pass has begun"
    assert transfers.prefetched_bytes == 4 * PART
    transfers.demand(one.key, one.parts, 0)
    transfers.cancel_prefetched()
    assert transfers.prefetched_bytes == 2 * PART, "the daemon may be writing to it"
    for number in list(transfers._pending):
        transfers.on_reply(0, Restored(number))
    assert transfers.prefetched_bytes == 0


def test_what_was_stored_may_stay_in_its_slot_and_gives_way() -> None:
    transfers = transfers_of(keeps_stored=True)
    one, other = away(transfers, PART), away(transfers, PART)
    kept = transfers.incoming[one.key]
    assert None not in [transfers.reserve(PART) for _ in range(3)]
    assert not kept.transfers, "the oldest goes first"
    assert transfers.incoming[other.key].transfers
    transfers.assert_invariants()


# --- another daemon -----------------------------------------------------------------------------


def handed_out(transfers: Transfers, nbytes: int = 2 * PART) -> tuple[StoredRange, list[int]]:
    """Return a record that is away, and the tickets of its chunks, which a pass uses already."""
    one = away(transfers, nbytes)
    storage = torch.UntypedStorage(nbytes)
    incoming = transfers.begin_in_place(one.key, one.parts, storage, is_demanded=True)
    for index, part in enumerate(one.parts):
        transfers.restore(incoming, index, Mapped(1, part.begin), 5)
    return one, transfers.hand_out(incoming, 7)


def test_what_was_used_and_is_damaged_is_known_without_its_daemon() -> None:
    transfers = transfers_of()
    one, (first, second) = handed_out(transfers)
    transfers.resume(lambda ticket: 3 if ticket == first else 0)
    assert not transfers.handed_out.is_used_by(7)
    assert isinstance(transfers.handed_out.failed[7].error, CorruptBlob)
    assert not transfers._pending
    transfers.assert_invariants()
    del one, second


def test_a_counter_that_several_restores_share_says_nothing() -> None:
    transfers = transfers_of()
    one = record(PART)
    _, (sent,) = send_all(transfers, one)
    transfers.on_reply(0, Admitted(sent.number))
    incoming = transfers.begin_in_place(
        one.key, one.parts, torch.UntypedStorage(PART), is_demanded=True
    )
    transfer = transfers.restore(incoming, 0, Mapped(1, 0), 5)
    transfers.handed_out._shares_counters = True
    transfers._outbox.clear()
    transfers.resume(lambda _: 0)
    assert [one.request for one in transfers._outbox] == [sent.number, transfer.number]


def test_what_is_no_answer_to_a_restore_is_ignored() -> None:
    """The bytes counted as restored, whatever a daemon said under the restore's number."""
    transfers, one = transfers_of(), record(PART)
    _, (sent,) = send_all(transfers, one)
    transfers.on_reply(0, Admitted(sent.number))
    transfers.on_reply(0, stored(sent))
    asked = transfers.demand(one.key, one.parts, 0).transfers[0]
    for nonsense in (Admitted(asked.number), Pong(), stored(asked)):
        transfers.on_reply(asked.number, nonsense)
        assert asked.phase is Phase.REQUESTED
    transfers.on_reply(0, Restored(asked.number))
    assert asked.phase is Phase.ARRIVED
    transfers.assert_invariants()


def test_numbers_that_no_store_has_any_more_are_passed_over() -> None:
    transfers, one = transfers_of(), record(PART)
    out = transfers.stores.begin_store(one)
    transfers.stores.store(out, range(PART), Mapped(1, 0), 8)
    transfers._outbox.clear()
    transfers.resume(last_number=8)
    assert [type(one.message) for one in transfers._outbox] == [Store]
    transfers._outbox.clear()
    transfers.resume(last_number=9)
    assert transfers._outbox[-1] == Envelope(0, PassOver(9))


# --- any order ----------------------------------------------------------------------------------


def test_what_another_daemon_does_not_take_is_lost_where_its_source_is_gone() -> None:
    """The one before had admitted it, so that its memory was let go."""
    transfers, one = transfers_of(), record(PART)
    _, (transfer,) = send_all(transfers, one)
    transfers.on_reply(0, Admitted(transfer.number))
    assert one.phase is RangePhase.OFFLOADED
    assert transfers.resume() == [transfer.number]
    transfers.on_reply(0, Rejected(transfer.number, "invalid", "no such segment"))
    assert isinstance(one.error, ActivationLost)
    assert "no such segment" in str(one.error)
    transfers.assert_invariants()


class TransfersMachine(RuleBasedStateMachine):
    """A session's events in any order that its lock allows, answered by a daemon in any order."""

    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.transfers = transfers_of()
        self.living: list[StoredRange] = []
        self.asked: dict[int, Transfer] = {}

    @initialize(keeps_stored=st.booleans())
    def begins(self, keeps_stored: bool) -> None:
        self.transfers = transfers_of(keeps_stored=keeps_stored, window=4 * PART)

    def demanded(self) -> list[tuple[Incoming, Transfer]]:
        """Return the parts that threads wait for and have not used."""
        ways = [one for one in self.transfers.incoming.values() if one.is_demanded]
        return [(way, part) for way in ways for part in way.transfers.values()]

    @rule(target=records, nbytes=st.integers(1, 3 * PART))
    def sends(self, nbytes: int) -> StoredRange:
        one = record(nbytes)
        self.living.append(one)
        demanded = self.demanded()
        out = self.transfers.stores.begin_store(one)
        for part in self.transfers.stores.split(nbytes):
            slot = self.transfers.reserve(len(part))
            assert self.demanded() == demanded, "what a thread waits for is not given up"
            if slot is None:
                self.transfers.stores.refuse(out, "daemon_slow")
                break
            transfer = send(self.transfers, out, part, Staged(slot.offset), slot)
            self.asked[transfer.number] = transfer
        return one

    @rule(target=records, parts=st.integers(1, 3))
    def sends_and_is_answered(self, parts: int) -> StoredRange:
        one = record(parts * PART)
        self.living.append(one)
        out = self.transfers.stores.begin_store(one)
        for part in self.transfers.stores.split(one.nbytes):
            transfer = send(self.transfers, out, part, Mapped(1, part.start))
            self.transfers.on_reply(0, Admitted(transfer.number))
            self.transfers.on_reply(0, stored(transfer))
        return one

    @rule(target=records, nbytes=st.integers(1, 3 * PART))
    def sends_from_where_it_lies(self, nbytes: int) -> StoredRange:
        one = record(nbytes)
        self.living.append(one)
        out = self.transfers.stores.begin_store(one)
        self.transfers.held.hold(out)
        for part in self.transfers.stores.split(nbytes):
            transfer = send(self.transfers, out, part, Mapped(1, part.start))
            self.asked[transfer.number] = transfer
        out.sequence = 1
        return one

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def is_answered(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.asked)))
        transfer = self.asked[number]
        if isinstance(transfer.of, Incoming):
            self._restored(transfer, data.draw(st.booleans()))
        else:
            self._stored(transfer, data.draw(st.sampled_from(["next", "next", "refuse", "fail"])))

    def _restored(self, transfer: Transfer, is_there: bool) -> None:
        number = transfer.number
        there = RestoredParts(pack([number])) if number % 2 else Restored(number)
        failed = Failed(number, 1, "CorruptBlob", "damaged")
        self.transfers.on_reply(0, there if is_there else failed)
        del self.asked[transfer.number]

    def _stored(self, transfer: Transfer, how: str) -> None:
        number = transfer.number
        if how == "next" and transfer.phase is Phase.SENT:
            self.transfers.on_reply(0, Admitted(number))
            return
        if how == "next":
            self.transfers.on_reply(0, stored(transfer))
        elif transfer.phase is Phase.SENT and how == "refuse":
            self.transfers.on_reply(0, Rejected(number, "quota", "too much"))
        elif transfer.phase is Phase.ADMITTED and how == "fail":
            self.transfers.on_reply(0, Failed(0, number, "CorruptBlob", "lost"))
        else:
            return
        del self.asked[number]

    @rule(done=st.sets(st.integers(1, 200)), status=st.sampled_from([0, 0, 3]))
    def is_asked_again_of_another_daemon(self, done: set[int], status: int) -> None:
        """The one before has done some restores, and has not said so."""
        transfers = self.transfers
        phases = {number: one.phase for number, one in transfers._pending.items()}
        done = {n for n in done if n in phases and isinstance(transfers._pending[n].of, Incoming)}
        is_over = {number for number, phase in phases.items() if phase is Phase.DROPPED} | done
        wanted = sorted(phases.keys() - is_over)
        transfers._outbox.clear()
        entries = transfers.resume(lambda ticket: status if ticket in done else None)
        assert [envelope.request for envelope in transfers._outbox] == wanted
        stores = [one.message.entry for one in transfers._outbox if isinstance(one.message, Store)]
        assert entries == stores
        assert sorted(transfers._pending) == wanted
        for number in phases.keys() - set(wanted):
            del self.asked[number]

    @rule(one=records)
    def fetches(self, one: StoredRange) -> None:
        incoming = self.transfers.incoming.get(one.key)
        if one.phase is not RangePhase.OFFLOADED or (incoming and incoming.storage is not None):
            return
        incoming = self.transfers.demand(one.key, one.parts, 0)
        for index in range(len(one.parts)):
            if index not in incoming.transfers:
                self.transfers.request_making_room(incoming, index, 0)
        self._note_requests(incoming)

    @rule(one=records)
    def fetches_ahead(self, one: StoredRange) -> None:
        if one.phase is not RangePhase.OFFLOADED or self.transfers.incoming.get(one.key):
            return
        incoming = self.transfers.begin_staged(one.key, one.parts)
        is_all = self.transfers.request_ahead(incoming, 0, 0)
        assert is_all == (len(incoming.transfers) == len(one.parts))
        self._note_requests(incoming)

    @rule(one=records, is_demanded=st.booleans())
    def fetches_into_memory(self, one: StoredRange, is_demanded: bool) -> None:
        if one.phase is not RangePhase.OFFLOADED or self.transfers.incoming.get(one.key):
            return
        storage = torch.UntypedStorage(one.nbytes)
        incoming = self.transfers.begin_in_place(
            one.key, one.parts, storage, is_demanded=is_demanded
        )
        for index in range(len(one.parts)):
            self.transfers.restore(incoming, index, Mapped(2, 0), 0)
        self._note_requests(incoming)

    @rule(one=records)
    def hands_out(self, one: StoredRange) -> None:
        incoming = self.transfers.incoming.get(one.key)
        if incoming is None or incoming.storage is None:
            return
        incoming.is_demanded = True
        if any(part.error for part in incoming.transfers.values()):
            with pytest.raises(StormError):
                self.transfers.handed_out.can_hand_out(incoming)
        elif self.transfers.handed_out.can_hand_out(incoming):
            expected = [p.number for p in incoming.transfers.values() if p.phase is Phase.REQUESTED]
            assert self.transfers.hand_out(incoming, 1) == expected
            assert self.transfers.handed_out.in_storage(incoming.storage) == expected

    @rule()
    def stalls(self) -> None:
        tickets = self.transfers.handed_out.fail_all(ActivationLost("nothing was heard"))
        assert not self.transfers.handed_out.is_used_by(1)
        assert not tickets or self.transfers.handed_out.failed[1].error is not None

    @rule(one=records)
    def comes_back(self, one: StoredRange) -> None:
        incoming = self.transfers.incoming.get(one.key)
        for transfer in list(incoming.transfers.values()) if incoming is not None else ():
            if transfer.phase is Phase.REQUESTED:
                self._restored(transfer, is_there=True)

    def _note_requests(self, incoming: Incoming) -> None:
        """Have the daemon answer what is asked for now."""
        for transfer in incoming.transfers.values():
            if transfer.phase is Phase.REQUESTED:
                self.asked[transfer.number] = transfer

    @rule(one=records, index=st.integers(0, 2))
    def uses_a_part(self, one: StoredRange, index: int) -> None:
        incoming = self.transfers.incoming.get(one.key)
        part = None if incoming is None else incoming.transfers.get(index)
        if incoming is not None and part is not None and part.phase is Phase.ARRIVED:
            self.transfers.finish_chunk(incoming, index)

    @rule(one=consumes(records))
    def dies(self, one: StoredRange) -> None:
        self.transfers.cancel(one.key)
        self.transfers.held.drop(one.key)
        self.living = [other for other in self.living if other is not one]

    @rule()
    def lets_the_oldest_source_go(self) -> None:
        out = self.transfers.held.excess()
        if out is not None and out.is_answered:
            self.transfers.held.drop(out.key)

    @rule()
    def runs_out_of_memory(self) -> None:
        self.transfers.window.shrink()
        self.transfers.cancel_prefetched()

    @invariant()
    def holds(self) -> None:
        self.transfers.assert_invariants()

    def teardown(self) -> None:
        """When all is answered and nothing lives, nothing is left."""
        for one in self.living:
            self.transfers.cancel(one.key)
            self.transfers.held.drop(one.key)
        for transfer in list(self.asked.values()):
            if isinstance(transfer.of, Incoming):
                self._restored(transfer, is_there=True)
            else:
                self.transfers.on_reply(0, Admitted(transfer.number))
                self.transfers.on_reply(0, stored(transfer))
        for key in list(self.transfers.incoming):  # what was kept when it was stored
            self.transfers.cancel(key)
        self.transfers.assert_invariants()
        assert not self.transfers._pending
        assert not self.transfers.held._sources
        assert self.transfers.prefetched_bytes == self.transfers._ahead_bytes == 0
        assert free_bytes(self.transfers) == STAGING


TestTransfersMachine = TransfersMachine.TestCase
