"""Which values checkpointing each block would keep: the reference for a plan's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from storm_client.planner.blocks import MIN_MADE, block_ends


@dataclass
class Made:
    """A value of a step, made in the module `path`."""

    path: str
    inputs: tuple[int, ...] = ()
    operation: str = "linear"
    nbytes: int = 100
    is_expensive: bool = True
    is_saved: bool = True
    is_made_inside: bool = False
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


def blocks(name: str, count: int) -> list[Made]:
    """Return the values of `count` blocks of a list."""
    return [Made(f"{name}.{block}.mlp") for block in range(count) for _ in range(MIN_MADE)]


def chained(values: list[Made]) -> list[Made]:
    """Make each value from the one before it."""
    return [replace(value, inputs=(number - 1,)) for number, value in enumerate(values)]


def test_the_last_value_of_each_block_is_kept() -> None:
    values = chained([Made("embed"), *blocks("layers", 3), Made("head")])
    assert block_ends(values) == {4, 8, 12}


def test_a_layer_that_is_alone_in_its_list_is_no_block() -> None:
    assert block_ends(chained([*blocks("stem", 1), *blocks("stages", 2)])) == {7, 11}
    assert block_ends(chained(blocks("stem", 1))) == frozenset()


def test_frozen_layers_are_no_blocks() -> None:
    """Of what they are given nothing is kept either."""
    frozen = [replace(one, is_made_inside=True) for one in blocks("vision.layers", 3)]
    values = chained([*frozen, *blocks("text.layers", 2)])
    assert block_ends(values) == {15, 19}


def test_blocks_inside_of_stages_are_used() -> None:
    values = chained([*blocks("stages.0.blocks", 3), *blocks("stages.1.blocks", 2)])
    assert block_ends(values) == {3, 7, 11, 15, 19}


def test_experts_are_no_blocks_for_each_reads_what_the_layer_has_made() -> None:
    layers = [[Made(f"layers.{n}.router"), *blocks(f"layers.{n}.experts", 3)] for n in range(2)]
    values = chained([*layers[0], *layers[1]])
    for first in (5, 9, 18, 22):
        values[first].inputs = (first // 13 * 13,)
    assert block_ends(values) == {12, 25}


def unet(text: Made) -> list[Made]:
    """Return two stages of two blocks each. Those of the second read what the first's have made."""
    values = [text]
    for stage, joins in ("down.0", False), ("up.0", True):
        for block in range(2):
            if joins:
                skipped = 20 - 10 * block
                values.append(Made(stage, (len(values) - 1, skipped), operation="cat"))
            for _ in range(10):
                values.append(Made(f"{stage}.resnets.{block}", (len(values) - 1,)))
    for stage in ("down.1", "up.1"):
        values += [Made(stage, (len(values) - 1,)) for _ in range(MIN_MADE)]
    return values


def test_blocks_that_skip_connections_join_are_used() -> None:
    assert block_ends(unet(Made("text"))) >= {10, 20, 31, 42}


def test_a_value_that_no_operation_makes_may_be_read_by_all_blocks() -> None:
    for operation, ends in ("", {10, 20}), ("linear", {20}):
        values = unet(Made("down.0", operation=operation))
        for reader in 3, 13:
            values[reader].inputs = (reader - 1, 0)
        assert block_ends(values) & {10, 20} == ends
