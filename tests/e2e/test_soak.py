"""Clients that want more than the pool holds: exact, without a leak, hardly a hole lost."""

from __future__ import annotations

from bench.soak import MIB, POOL_BYTES, soak

OPERATIONS = 3_000


def test_eight_clients_at_the_limit_of_the_pool() -> None:
    """`bench.soak` asserts: every byte right, the arena's invariants, nothing left at the end."""
    figures = soak(OPERATIONS)
    assert figures["operations"] >= OPERATIONS
    assert figures["peak_used_bytes"] > POOL_BYTES // 4
    assert figures["fragmentation"]["usable_share"] >= 0.95
    if figures["fragmentation"]["free_bytes"] > 64 * MIB:
        assert figures["fragmentation"]["blocks_of_64_mib"] >= 1
