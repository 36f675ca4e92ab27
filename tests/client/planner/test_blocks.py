"""What checkpointing would keep of a step's blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from storm_client.planner.blocks import MIN_MADE, block_ends


@dataclass
class Made:
    path: str
    inputs: tuple[int, ...] = ()
    nbytes: int = 100
    is_expensive: bool = False
    is_saved: bool = True


def made(*layers: str) -> list[Made]:
    """Return values of layers; of one with a number all that a block has at the least."""
    return [Made(layer) for layer in layers for _ in range(MIN_MADE if layer[-1:].isdigit() else 1)]


def test_of_each_block_the_last_that_it_has_made_counts() -> None:
    layers = ["embed", *[f"layers.{n}" for n in range(3)], "head"]
    assert block_ends(made(*layers)) == {4, 8, 12}


def test_a_layer_that_is_alone_in_its_list_is_no_block() -> None:
    assert block_ends(made("layers.0", "stages.0", "stages.1")) == {7, 11}
    assert block_ends(made("layers.0")) == frozenset()


def test_without_numbered_layers_nothing_is_known() -> None:
    assert block_ends(made("", "(model)", "encoder")) == frozenset()
    assert block_ends([]) == frozenset()


def stage(name: str, *blocks: int, nbytes: int = 100) -> list[Made]:
    """Return values of blocks inside of one layer, of which each goes on from the one before."""
    return [
        Made(f"{name}.{block}.mlp.{n}", nbytes=nbytes) for block in blocks for n in range(MIN_MADE)
    ]


def chained(values: list[Made]) -> list[Made]:
    """Have each value be made from the one before it."""
    return [replace(value, inputs=(number - 1,)) for number, value in enumerate(values)]


def test_blocks_in_stages_count_by_themselves() -> None:
    values = [*stage("stages.0.blocks", 0, 1, 2), *stage("stages.1.blocks", 0, 1)]
    assert block_ends(chained(values)) == {0, 4, 8, 12, 16}


def test_experts_are_no_blocks_for_each_reads_what_the_layer_has_made() -> None:
    layers = [
        [Made(f"layers.{n}.attention"), *stage(f"layers.{n}.experts", 0, 1, 2)] for n in range(2)
    ]
    values = chained([*layers[0], *layers[1]])
    for first in (5, 9, 18, 22):  # of an expert but the first
        values[first].inputs = (first // 13 * 13,)
    for value in values:
        value.is_expensive = True
    assert block_ends(values) == {12, 25}


def ends(*last: Made) -> frozenset[int]:
    """Return what is kept of a block that ends so, whose last have the numbers from 1 on."""
    before = [Made(BLOCK, is_saved=False) for _ in range(MIN_MADE)]
    first = made("layers.0")
    offset = len(first) + len(before) - 1

    def moved(one: Made) -> Made:
        return replace(one, inputs=tuple(n + offset if n > 0 else n for n in one.inputs))

    found = block_ends([*first, *before, *map(moved, last)]) - {len(first) - 1}
    return frozenset(n - offset for n in found)


BLOCK = "layers.1"


def test_a_norm_at_the_end_is_recomputed_from_what_it_saves() -> None:
    assert ends(Made(BLOCK), Made(BLOCK, (1,))) == {1}
    assert ends(Made(BLOCK), Made(BLOCK, (1,)), Made(BLOCK, (2, -1))) == {1}


def test_what_is_made_from_more_or_from_other_things_is_kept_itself() -> None:
    for last in (
        [Made(BLOCK), Made(BLOCK, (0, 1))],  # the sum of a residual
        [Made(BLOCK), Made(BLOCK, (1,), is_expensive=True)],
        [Made(BLOCK, is_saved=False), Made(BLOCK, (1,))],
        [Made(BLOCK, nbytes=101), Made(BLOCK, (1,))],
        [Made(BLOCK), Made(BLOCK, (0,))],  # of the block before
        [Made(BLOCK, (2,)), Made(BLOCK, (1,))],
    ):
        numbered = ends(*last)
        assert numbered == ({2} if last[0].inputs == () else {1}), last
