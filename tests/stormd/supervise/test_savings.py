"""The line about what was saved."""

from __future__ import annotations

from typing import Any

from stormd.supervise.savings import describe_savings


def _state(raw: int, stored: int, refused: int = 0, earlier: int = 0) -> dict[str, Any]:
    return {
        "earlier": {"raw_bytes": earlier, "blob_bytes": earlier},
        "throughput": {"store": {"raw_bytes": raw, "blob_bytes": stored}},
        "pool": {"peak_used_bytes": 3 << 30, "capacity_bytes": 4 << 30},
        "counters": {"rejected": {"pool_full": refused}},
    }


def test_what_a_daemon_of_its_own_did_is_the_run_s() -> None:
    assert describe_savings(None, _state(12 << 30, 8 << 30)) == (
        "offloaded 12.0 GiB, stored as 8.0 GiB, ratio 1.50; "
        "the pool held at most 3.0 GiB of 4.0 GiB"
    )


def test_of_a_shared_one_it_is_the_difference() -> None:
    text = describe_savings(_state(10 << 30, 8 << 30), _state(14 << 30, 10 << 30))
    assert text.startswith("offloaded 4.0 GiB, stored as 2.0 GiB, ratio 2.00; ")
    assert text.endswith(" since its start; it serves others too")


def test_a_pool_that_was_full_is_told_of_with_the_next_step() -> None:
    text = describe_savings(None, _state(2 << 30, 1 << 30, refused=17))
    assert text.endswith("refused 17 stores because the pool was full: set a larger --pool-bytes")


def test_what_was_stored_before_a_restart_counts() -> None:
    text = describe_savings(None, _state(0, 0, earlier=2 << 30))
    assert text.startswith("offloaded 2.0 GiB, stored as 2.0 GiB, ratio 1.00; ")


def test_nothing_offloaded_asks_about_the_script() -> None:
    assert describe_savings(_state(5, 5), _state(5, 5)).startswith("nothing was offloaded: ")
    assert not describe_savings(_state(5, 5), _state(5, 5), has_failed=True)
