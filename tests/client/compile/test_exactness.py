"""What draws random numbers, by PyTorch's own tags and the schemas of its operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
from storm_client.compile.exactness import draws, is_seed
from storm_client.step.nodes import is_random
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten

TAGGED_AND_GIVEN_A_SEED = {
    "aten._cudnn_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
}
"""Of PyTorch 2.13; older ones do not have the first."""


def overloads() -> Iterator[OpOverload]:
    """Yield all operators of PyTorch's own."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name in names:
        space, _, packet = name.partition("::")
        if space == "aten" and hasattr(aten, packet):
            found = getattr(aten, packet)
            yield from (getattr(found, one) for one in found.overloads())


def test_of_all_that_is_tagged_what_is_given_its_seed_draws_nothing() -> None:
    tagged = [one for one in overloads() if torch.Tag.nondeterministic_seeded in one.tags]
    assert len(tagged) > 100
    found = {str(one) for one in tagged if not draws(one)}
    assert found | {"aten._cudnn_attention_backward.default"} == TAGGED_AND_GIVEN_A_SEED


def test_what_is_not_tagged_draws_nothing() -> None:
    assert not any(
        draws(one) for one in overloads() if torch.Tag.nondeterministic_seeded not in one.tags
    )


@pytest.mark.parametrize("kind", ["cudnn", "efficient", "flash"])
def test_attention_hands_its_seed_to_its_backward_pass(kind: str) -> None:
    """So whoever gives a backward pass its seed has it from an operation that is known to draw."""
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    graph = fx.Graph()
    given = [graph.placeholder(f"given_{number}") for number in range(3)]
    made = graph.call_function(forward, tuple(given), {"dropout_p": 0.1})
    names = [one.name for one in forward._schema.returns]
    parts = {name: graph.call_function(operator.getitem, (made, n)) for n, name in enumerate(names)}
    seeds = {name for name, part in parts.items() if is_seed(part)}
    assert seeds in ({"philox_seed", "philox_offset"}, {"rng_state", "unused"})
    again = graph.call_function(
        backward,
        tuple(parts[name] for name in seeds),
        {"dropout_p": 0.1},
    )
    assert is_random(made)
    assert not is_random(again)
    assert not is_seed(made)
    assert not any(map(is_seed, given))


def test_no_part_of_a_list_is_a_seed() -> None:
    """Fused updates return lists, and a list counts as one of an operation's results."""
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(aten._foreach_add.List, ([given] * 3, [given] * 3))
    parts = [graph.call_function(operator.getitem, (made, number)) for number in range(3)]
    assert not any(map(is_seed, parts))
