"""What checkpointing would keep of a step's blocks."""

from __future__ import annotations

from storm_client.planner.blocks import checkpointed_bytes


def test_of_each_block_the_last_that_it_has_made_counts() -> None:
    made = [("embed", 7), *[(f"layers.{n}", size) for n in range(3) for size in (100, 400, 10 + n)]]
    assert checkpointed_bytes([*made, ("head", 1000)]) == 10 + 11 + 12


def test_a_layer_that_is_alone_in_its_list_is_no_block() -> None:
    assert checkpointed_bytes([("layers.0", 10), ("stages.0", 3), ("stages.1", 4)]) == 7
    assert checkpointed_bytes([("layers.0", 10)]) is None


def test_without_numbered_layers_nothing_is_known() -> None:
    assert checkpointed_bytes([("", 10), ("(model)", 20), ("encoder", 30)]) is None
    assert checkpointed_bytes([]) is None


def test_blocks_of_a_model_beside_others_are_told_apart() -> None:
    assert checkpointed_bytes([("0:layers.0", 1), ("1:layers.0", 2), ("1:layers.1", 4)]) == 6
