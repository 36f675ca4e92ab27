"""Many clients at once are all served, and all that they held is free when they have left."""

from __future__ import annotations

from bench.load import beside_a_greedy_one, crowd, lanes

CLIENTS = 6
SECONDS = 0.5


def test_a_crowd_is_served_and_leaves_nothing() -> None:
    """`bench.load` asserts: every byte right, every goodbye answered, nothing held at the end."""
    figures = crowd(CLIENTS, SECONDS)
    assert figures["operations_per_second"] > 0
    assert figures["least_to_most_served"] > 0


def test_a_greedy_client_leaves_others_their_turn() -> None:
    figures = beside_a_greedy_one(SECONDS)
    assert figures["beside"]["operations_per_second"] > 0
    assert figures["beside"]["greedy_bytes_per_second"] > 0


def test_clients_of_several_workers_are_served_as_those_of_one() -> None:
    figures = lanes(2, SECONDS)
    assert figures["workers_off"]["operations_per_second"] > 0
    assert figures["workers_2"]["operations_per_second"] > 0
    assert len(figures["workers_2"]["workers_processor_seconds"]) == 2
