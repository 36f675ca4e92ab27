"""What of a range of addresses is mapped."""

from __future__ import annotations

import random

from stormd.ledger.address_ranges import AddressRange

NBYTES = 40


def test_a_range_knows_what_is_mapped() -> None:
    chance, made = random.Random(0), AddressRange(NBYTES)
    pieces: dict[int, int] = {}
    for _ in range(2000):
        begin, nbytes = chance.randrange(NBYTES + 4), chance.randint(1, 12)
        mapped = {at for first, size in pieces.items() for at in range(first, first + size)}
        wanted = set(range(begin, begin + nbytes))
        assert made.covers(begin, begin + nbytes) == (wanted <= mapped)
        is_free = begin + nbytes <= NBYTES and not wanted & mapped
        assert bool(made.problem(begin, nbytes)) != is_free
        if is_free:
            made.add(begin, nbytes)
            pieces[begin] = nbytes
        elif pieces and chance.random() < 0.5:
            first = chance.choice(list(pieces))
            assert made.remove(first) == pieces.pop(first)
        made.assert_invariants()
