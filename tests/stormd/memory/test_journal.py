"""Records survive a process that ends at any instruction: whole, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stormd.memory.journal import (
    CELL_BYTES,
    FILE_BYTES,
    PAGE_BYTES,
    Found,
    Journal,
    JournalUnusable,
)

PAYLOADS = st.binary(max_size=600)


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.make()
    yield made
    made.close()


def reopened(journal: Journal) -> tuple[Journal, list[Found]]:
    """Return what another process would find now."""
    return Journal.open(os.dup(journal.descriptor))


def contents(journal: Journal) -> list[tuple[int, bytes]]:
    other, found = reopened(journal)
    other.assert_invariants()
    other.close()
    return [(one.kind, one.payload) for one in found]


def test_a_record_is_read_as_it_was_written(journal: Journal) -> None:
    expected = []
    for length in (0, 1, 103, 104, 105, 208, 209, 5000, 1 << 20):
        expected.append((7, os.urandom(length)))
        journal.write(*expected[-1])
    assert contents(journal) == expected
    journal.assert_invariants()


def test_what_was_erased_or_replaced_is_gone_and_its_cells_serve_again(journal: Journal) -> None:
    first, second = journal.write(1, b"a" * 300), journal.write(2, b"b")
    journal.erase(first)
    assert contents(journal) == [(2, b"b")]
    third = journal.replace(second, 3, b"c" * 200)
    assert contents(journal) == [(3, b"c" * 200)]
    journal.erase(third)
    for _ in range(1000):
        journal.erase(journal.write(1, b"x" * 250))
    assert journal._used_end() == PAGE_BYTES // CELL_BYTES * 2  # one page of cells, ever
    journal.assert_invariants()


def test_records_that_are_too_long_are_refused(journal: Journal) -> None:
    with pytest.raises(ValueError, match="16777217 bytes"):
        journal.write(1, bytes((1 << 24) + 1))
    assert contents(journal) == []


def test_other_files_and_damaged_headers_are_refused(journal: Journal) -> None:
    (before,) = os.pread(journal.descriptor, 1, 17)  # at random
    os.pwrite(journal.descriptor, bytes([before ^ 0xFF]), 17)
    with pytest.raises(JournalUnusable, match="damaged"):
        Journal.open(journal.descriptor)
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    with pytest.raises(JournalUnusable, match="no journal"):
        Journal.open(descriptor)
    os.close(descriptor)
    read, write = os.pipe()
    with pytest.raises(JournalUnusable, match="cannot be read"):
        Journal.open(read)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("erased", [8, 12, None])
def test_an_erased_record_is_not_taken_for_one_that_is_cut_off(
    journal: Journal, erased: int | None
) -> None:
    """Another process counts from what it finds, so both have one sequence. `erased` bytes of the
    first record's begin were erased when its process ended; all of it for None."""
    cell = journal.write(1, b"")
    begin = cell * CELL_BYTES
    if erased is None:
        journal.erase(cell)
    else:
        os.pwrite(journal.descriptor, bytes(erased), begin)
    other, found = reopened(journal)
    assert found == []
    before = os.pread(journal.descriptor, begin + CELL_BYTES, 0)
    assert other.write(1, b"\0") == cell
    after = os.pread(journal.descriptor, begin + CELL_BYTES, 0)
    other.close()
    for split in range(begin, begin + CELL_BYTES + 1):
        for mixed in (after[:split] + before[split:], before[:split] + after[split:]):
            assert found_in(mixed) in ([], [(1, b"\0")])


class Crashes(RuleBasedStateMachine):
    """After each operation another process reads; and what one finds that was cut off in its midst.

    An operation's bytes reach memory in any order: each prefix and each suffix of what it changes
    is looked at. What is found is the state before it or after it, and between those of `replace`
    both records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.journal = Journal.make()
        self.records: dict[int, tuple[int, bytes]] = {}

    def teardown(self) -> None:
        self.journal.close()

    @rule(kind=st.integers(1, 9), payload=PAYLOADS, cut=st.integers(0, 1 << 12))
    def write(self, kind: int, payload: bytes, cut: int) -> None:
        before = self.memory()
        cell = self.journal.write(kind, payload)
        assert cell not in self.records
        self.look_at_cuts(before, cut, [self.held(), [*self.held(), (kind, payload)]])
        self.records[cell] = kind, payload

    @rule(which=st.integers(0, 99), cut=st.integers(0, 1 << 12))
    def erase(self, which: int, cut: int) -> None:
        if not self.records:
            return
        cell = sorted(self.records)[which % len(self.records)]
        before, held = self.memory(), self.held()
        self.journal.erase(cell)
        gone = self.records.pop(cell)
        left = list(held)
        left.remove(gone)
        self.look_at_cuts(before, cut, [held, left])

    @rule(
        which=st.integers(0, 99), kind=st.integers(1, 9), payload=PAYLOADS, cut=st.integers(0, 4096)
    )
    def replace(self, which: int, kind: int, payload: bytes, cut: int) -> None:
        if not self.records:
            return
        cell = sorted(self.records)[which % len(self.records)]
        old = self.records[cell]
        fresh = self.journal.write(kind, payload)
        assert contents(self.journal) == [*self.held(), (kind, payload)]
        before = self.memory()
        self.journal.erase(cell)
        both = [*self.held(), (kind, payload)]
        del self.records[cell]
        self.records[fresh] = kind, payload
        left = list(both)
        left.remove(old)
        self.look_at_cuts(before, cut, [both, left])

    @rule()
    def go_on_in_another_process(self) -> None:
        other, found = reopened(self.journal)
        assert {one.cell: (one.kind, one.payload) for one in found} == self.records
        self.journal.close()
        self.journal = other

    @invariant()
    def all_is_found(self) -> None:
        assert contents(self.journal) == self.held()
        self.journal.assert_invariants()

    # --- helpers

    def held(self) -> list[tuple[int, bytes]]:
        """Return what there is, in the order in which it was written."""
        return list(self.records.values())

    def memory(self) -> bytes:
        return os.pread(self.journal.descriptor, self.journal._used_end() * CELL_BYTES, 0)

    def look_at_cuts(self, before: bytes, cut: int, allowed: list[list[tuple[int, bytes]]]) -> None:
        after = self.memory()
        before = before.ljust(len(after), b"\0")
        changed = [at for at in range(len(after)) if after[at] != before[at]]
        if not changed:
            return
        split = changed[cut % len(changed)]
        expected = [sorted(one) for one in allowed]
        for mixed in (after[:split] + before[split:], before[:split] + after[split:]):
            assert sorted(found_in(mixed)) in expected


def found_in(memory: bytes) -> list[tuple[int, bytes]]:
    """Return what a journal whose file begins with these bytes holds."""
    copy = Journal.make()
    os.pwrite(copy.descriptor, memory, 0)
    try:
        return contents(copy)
    finally:
        copy.close()


TestCrashes = Crashes.TestCase


def test_the_file_takes_memory_only_as_it_is_used(journal: Journal) -> None:
    for _ in range(100):
        journal.write(1, b"x" * 100)
    assert os.fstat(journal.descriptor).st_size == FILE_BYTES
    assert os.fstat(journal.descriptor).st_blocks * 512 <= 8 * PAGE_BYTES
