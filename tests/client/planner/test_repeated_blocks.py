"""Blocks that are found by what repeats of a step's values."""

from __future__ import annotations

from collections.abc import Sequence

from storm_client.planner.blocks import MIN_MADE
from storm_client.planner.problem import Value
from storm_client.planner.repeated_blocks import repeated_ends
from support.planning import alike_blocks, value


def chain(*names: str) -> list[Value]:
    """Return values of which each is made from the one before."""
    return [value(0), *(value(n, 100, name, n - 1) for n, name in enumerate(names, 1))]


def residual(values: list[Value], *names: str, also: Sequence[int] = ()) -> None:
    """Add a sum of the last value and of what a chain makes of it, which reads others as well."""
    begin = len(values) - 1
    for name in names:
        values.append(value(len(values), 100, name, len(values) - 1, *also))
    values.append(value(len(values), 100, "add", begin, len(values) - 1))


def transformer(blocks: int) -> tuple[list[Value], list[int]]:
    """Return the values of an embedding, blocks of two sums each and a loss; and their ends."""
    values, ends = chain("embedding"), []
    for _ in range(blocks):
        residual(values, "norm", "linear", "attention", "linear")
        residual(values, "norm", "linear", "gelu", "linear")
        ends.append(len(values) - 1)
    values += [value(len(values), 100, name, len(values) - 1) for name in ("linear", "softmax")]
    return values, ends


def test_a_block_is_what_repeats_of_segments_between_joints() -> None:
    values, ends = transformer(5)
    assert repeated_ends(values) == set(ends)
    same, _ = alike_blocks(4)
    assert repeated_ends(same) == {1, 5, 9, 13}  # norms have the fewest bytes, and are saved


def test_where_nothing_repeats_there_is_no_block() -> None:
    assert repeated_ends([]) == frozenset()
    assert repeated_ends(chain("conv", "norm", "relu", "pool", "linear", "softmax")) == frozenset()
    values, _ = transformer(1)
    assert repeated_ends(values) == frozenset()


def test_a_list_of_single_functions_has_blocks_of_several() -> None:
    found = sorted(repeated_ends(chain(*["linear", "relu"] * 2 * MIN_MADE)))
    assert found == [MIN_MADE, 2 * MIN_MADE, 3 * MIN_MADE]
