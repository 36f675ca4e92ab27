"""Speed of late: over the time in which something was under way, ended or not."""

from __future__ import annotations

from stormd.ledger.spill_moves import Bandwidth


def test_idle_time_does_not_count_and_overlaps_count_once() -> None:
    speed = Bandwidth()
    speed.begin(0.0)
    assert speed.bytes_per_second(0.5) is None, "nothing is known"
    speed.begin(0.5)
    speed.end(1.0, 100)
    speed.end(1.0, 100)
    speed.begin(50.0)
    speed.end(51.0, 200)
    assert speed.bytes_per_second(99.0) == 200.0
    assert (speed.total_bytes, speed.busy_seconds) == (400, 2.0)


def test_what_has_not_ended_slows_it_down() -> None:
    speed = Bandwidth()
    speed.begin(0.0)
    speed.end(1.0, 1000)
    speed.begin(1.0)
    assert speed.bytes_per_second(1.0) == 1000.0
    assert speed.bytes_per_second(10.0) == 100.0
