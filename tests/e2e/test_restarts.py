"""The daemon is killed and restarted under trainers, which do not notice; real processes.

The rounds are those of `bench.restarts`, which asserts what must hold: gradients right to the bit,
no trainer that raises, nothing left where trainers and daemon are killed together.
"""

from __future__ import annotations

import pytest
from bench.restarts import end_all, end_daemons

KILLS = 6
RESTARTS = 2


def test_trainers_go_on_though_their_daemon_is_killed_and_restarted() -> None:
    figures = end_daemons(KILLS, RESTARTS, seed=1)
    assert figures["right_steps"] >= 2 * (KILLS + RESTARTS)


def test_nothing_is_left_where_all_are_killed_together() -> None:
    end_all(2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_trainers_go_on_for_long() -> None:
    end_daemons(200, 50, seed=2)
