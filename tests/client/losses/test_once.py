"""A gradient without a graph of its own is a plain one, until somebody differentiates it."""

from __future__ import annotations

import pytest
import torch
from storm_client.losses.once import differentiable_once, follower


def test_without_a_graph_gradients_are_returned_as_they_are() -> None:
    gradients = (torch.ones(3), None)
    with torch.no_grad():
        found = differentiable_once(gradients, torch.ones(2, requires_grad=True), message="no")
    assert found[0] is gradients[0]
    assert found[1] is None


def test_to_differentiate_one_raises_for_every_source() -> None:
    first, second, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    found, missing = differentiable_once(
        [torch.ones(3), None], first * 2, second, None, message="not twice"
    )
    assert missing is None
    assert found is not None
    found.mul_(2)  # it may be modified, as any gradient
    assert found.tolist() == [2.0] * 3
    for source in (first, second):
        with pytest.raises(RuntimeError, match="not twice"):
            torch.autograd.grad(found.sum(), source, allow_unused=True, retain_graph=True)
    assert torch.autograd.grad(found.sum(), other, allow_unused=True) == (None,)


def test_a_follower_has_the_place_of_a_tensor_and_not_its_memory() -> None:
    leaf = torch.ones(2, requires_grad=True)
    source = leaf * 2
    following = follower(source, "not twice")
    assert following.numel() == 0
    (found,) = differentiable_once([torch.ones(3)], following, message="not twice")
    assert found is not None
    with pytest.raises(RuntimeError, match="not twice"):
        torch.autograd.grad(found.sum(), leaf)
