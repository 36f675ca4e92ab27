"""link_meter.py: totals, and what the last interval was, by a clock that the test sets."""

from __future__ import annotations

import pytest

from stormd.monitoring.link_meter import LARGE_BYTES, MIN_COPIED, LinkMeter

GB = 10**9


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> LinkMeter:
    return LinkMeter("cuda:0", "a uuid", clock=clock)


def test_speed_is_that_while_busy(meter: LinkMeter, clock: Clock) -> None:
    clock.now += 0.5
    meter.copied("store", 5 * GB, 0.1)
    status = meter.as_status()
    assert status["store"]["bytes"] == 5 * GB
    assert status["store"]["bytes_per_second"] == pytest.approx(50 * GB)
    assert status["store"]["busy_share"] == pytest.approx(0.2)
    assert status["restore"]["bytes"] == 0


def test_what_was_long_ago_is_in_the_totals_alone(meter: LinkMeter, clock: Clock) -> None:
    meter.copied("restore", GB, 0.5)
    for _ in range(2):
        clock.now += 1.5
        meter.as_status()
    clock.now += 0.5
    meter.copied("restore", GB, 0.1)
    found = meter.as_status()["restore"]
    assert found["bytes"] == 2 * GB
    assert found["busy_seconds"] == pytest.approx(0.6)
    assert found["bytes_per_second"] == pytest.approx(10 * GB)
    assert found["busy_share"] == pytest.approx(0.1 / 2.0)


def test_the_speed_of_late_is_what_others_leave_and_stays_while_nothing_is_copied(
    meter: LinkMeter, clock: Clock
) -> None:
    """Another GPU on the same switch has copies take twice as long, until it rests."""
    assert meter.bytes_per_second() == 0
    meter.copied("store", MIN_COPIED - 1, 1.0)
    assert meter.bytes_per_second() == 0, "too little to tell"
    for rate in (50 * GB, 25 * GB, 50 * GB):
        for _ in range(80):
            meter.copied("store", rate // 10, 0.1)
            meter.copied("restore", rate // 5, 0.1)
        assert meter.bytes_per_second() == pytest.approx(rate, rel=0.01)
    clock.now += 3600
    for _ in range(100):
        meter.copied("store", 1 << 20, 1e-3)
    assert meter.bytes_per_second() == pytest.approx(50 * GB, rel=0.01), "small ones say nothing"


def test_the_first_speed_counts_until_enough_is_copied() -> None:
    meter = LinkMeter("cuda:0", "a uuid", initial=12 * GB)
    meter.copied("store", MIN_COPIED - 1, 1e-3)
    assert meter.bytes_per_second() == 12 * GB
    meter.copied("store", 5 * GB, 0.2)
    assert meter.bytes_per_second() == pytest.approx(25 * GB, rel=0.02)


def test_the_codec_is_as_fast_as_where_nothing_delayed_it(meter: LinkMeter) -> None:
    """A batch that waited for other kernels, or is small, says nothing about the codec."""
    meter.coded("store", GB, 1e-3)
    meter.coded("store", GB, 9e-3)
    assert not meter.coded_per_second(), "how fast it decodes is not known"
    meter.coded("restore", LARGE_BYTES - 1, 1e-9)
    assert not meter.coded_per_second()
    meter.coded("restore", GB, 3e-3)
    assert meter.coded_per_second() == pytest.approx(250 * GB)
