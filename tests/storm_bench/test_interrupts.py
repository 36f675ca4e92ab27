"""interrupts.py: both signals are raised where they strike, noted, and left as they were."""

from __future__ import annotations

import signal

import pytest
from storm_bench.interrupts import SIGNALS, noted_interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_raised_and_again_by_a_check(number: int) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with noted_interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_ignored_counts(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with noted_interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
