"""What a trial finds out of a layer, by its first call or by its second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from storm_client.errors import ActivationLost
from storm_client.plan.layer_trial import call_twice
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward

WIDTH = 8
NOT_PYTORCHS = "random numbers that are not PyTorch's own"


class Called(nn.Module):
    """Counts calls where no trial looks."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(self)
        return self.function(self, *args, **kwargs)


CALLS: list[nn.Module] = []


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


def given() -> Tensor:
    return torch.ones(2, WIDTH, requires_grad=True)


def tried(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, str]:
    made, difference, _ = call_twice(module, module.forward, args, kwargs, name="layers.0")
    return made, difference


# --- what the first call shows, so that there is no second ----------------------------------------


def draw_from_python(layer: Called, x: Tensor) -> Any:
    return layer.linear(x) * (2 if random.random() < 1e-9 else 1)


def draw_from_numpy(layer: Called, x: Tensor) -> Any:
    import numpy as np

    return layer.linear(x) * (2 if np.random.rand() < 1e-9 else 1)


def draw_from_its_own(layer: Called, x: Tensor) -> Any:
    return layer.linear(x) * bool(torch.rand((), generator=layer.own) < 2)


GENERATOR = torch.Generator()


def draw_from_one_that_is_global(layer: Called, x: Tensor) -> Any:
    return layer.linear(x) * torch.ones(WIDTH).bernoulli_(0.5, generator=GENERATOR)


def append(layer: Called, x: Tensor, found: list[Tensor]) -> Any:
    found.append(layer.linear(x))
    return found[-1]


def replace(layer: Called, x: Tensor, found: dict[str, Tensor]) -> Any:
    found["h"] = layer.linear(x)
    return found["h"]


def set_item(layer: Called, x: Tensor) -> Any:
    layer.found["h"] = layer.linear(x)
    return layer.found["h"]


def set_attribute_of_object(layer: Called, x: Tensor) -> Any:
    layer.shared.h = layer.linear(x)
    return layer.shared.h


def copy_to_attribute(layer: Called, x: Tensor) -> Any:
    layer.last.copy_(x.detach())
    return layer.linear(x)


@pytest.mark.parametrize(
    ("function", "arguments", "attributes", "reason"),
    [
        (draw_from_python, (), {}, NOT_PYTORCHS),
        (draw_from_numpy, (), {}, NOT_PYTORCHS),
        (draw_from_its_own, (), {"own": torch.Generator()}, NOT_PYTORCHS),
        (draw_from_one_that_is_global, (), {}, NOT_PYTORCHS),
        (append, ([],), {}, "changes what it is given"),
        (replace, ({},), {}, "changes what it is given"),
        (replace, ({"h": torch.zeros(1)},), {}, "changes what it is given"),
        (set_item, (), {"found": {"h": None}}, "changes what its modules hold"),
        (set_attribute_of_object, (), {"shared": SimpleNamespace(h=0)}, "its modules hold"),
        (copy_to_attribute, (), {"last": torch.zeros(2, WIDTH)}, "its modules hold"),
    ],
)
def test_one_call_is_enough(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    attributes: dict[str, Any],
    reason: str,
) -> None:
    made, difference = tried(Called(function, **attributes), given(), *arguments)
    assert reason in difference
    assert len(CALLS) == 1
    made.sum().backward()


def draw_from_pytorchs(layer: Called, x: Tensor) -> Any:
    return layer.linear(x) * torch.rand(WIDTH, generator=torch.default_generator)


def test_pytorchs_own_generator_may_be_named() -> None:
    assert not tried(Called(draw_from_pytorchs), given())[1]


def test_who_exchanges_something_with_others_is_called_once(tmp_path: Path) -> None:
    def reduce(layer: Called, x: Tensor) -> Any:
        mean = x.detach().mean()
        dist.all_reduce(mean)
        return layer.linear(x) * mean

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _, difference = tried(Called(reduce), given())
    finally:
        dist.destroy_process_group()
    assert "exchanges something with other processes" in difference
    assert len(CALLS) == 1


def test_what_the_first_call_raises_is_the_users() -> None:
    def fail(layer: Called, x: Tensor) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        tried(Called(fail), given())


# --- what the second call makes -------------------------------------------------------------------


def test_one_tensor_given_twice_is_one_again() -> None:
    def is_self_attention(layer: Called, query: Tensor, key: Tensor, *, more: list[Tensor]) -> Any:
        return layer.linear(query) * (2 if query is key and key is more[0] else 1)

    x = given()
    assert tried(Called(is_self_attention), x, x, more=[x])[1] == ""


def nothing_in_it(x: Tensor) -> Tensor:
    return torch.cat((x[:0], x)) + torch.zeros(0).sum()


def without_memory(x: Tensor) -> Tensor:
    return x * (torch.empty(2, device="meta") * 2).shape[0]


def transformed(x: Tensor) -> Tensor:
    made: Tensor = torch.vmap(torch.sin)(x)
    return made


def nested(x: Tensor) -> Tensor:
    one = torch.nested.nested_tensor([x[:1].detach(), x.detach()], layout=torch.jagged)
    return x + one.to_padded_tensor(0.0).sum()


@pytest.mark.parametrize("function", [nothing_in_it, without_memory, transformed, nested])
def test_tensors_that_have_no_bytes_of_their_own(function: Callable[[Tensor], Tensor]) -> None:
    made, difference = tried(Called(lambda layer, x: function(layer.linear(x))), given())
    assert difference == ""
    assert len(CALLS) == 3  # the last without a graph
    made.sum().backward()


def test_memory_that_is_yet_to_be_filled_is_not_compared() -> None:
    kept: list[Tensor] = []

    def fill(layer: Called, x: Tensor) -> Any:
        kept.append(torch.empty(len(CALLS), WIDTH))  # whatever is there, so much is another
        return layer.linear(x)

    assert tried(Called(fill), given())[1] == ""


def test_memory_behind_a_result_is_not_compared() -> None:
    """On a GPU `unique` returns the first part of memory whose rest nobody has written to."""
    rests = iter((1.0, 2.0, 3.0))

    def first_part(layer: Called, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            found = torch.full((2, WIDTH), next(rests)).resize_(1, WIDTH).zero_()
        return layer.linear(x) + found.add_(0.0)

    _, difference = tried(Called(first_part), given())
    assert difference == ""


def test_a_number_that_is_set_to_the_same_is_no_change() -> None:
    def set_scale(layer: Called, x: Tensor) -> Any:
        layer.scale = 1 / len(x)
        return layer.linear(x) * layer.scale

    assert tried(Called(set_scale, scale=0.5), given())[1] == ""


@pytest.mark.parametrize("last", [torch.tanh, torch.Tensor.sum], ids=["saves", "saves nothing"])
def test_what_a_second_call_hands_on_unseen_is_no_part_of_a_loss(
    last: Callable[[Tensor], Tensor],
) -> None:
    unseen: list[Tensor] = []

    def hand_on(layer: Called, x: Tensor) -> Any:
        unseen.append(last(layer.linear(x)))
        return unseen[-1] * 1

    made, difference = tried(Called(hand_on), given())
    assert difference == ""
    made.sum().backward()
    with pytest.raises(ActivationLost, match=r"layers\.0 was called twice.*layers=\[\]"):
        unseen[1].sum().backward()


def test_a_parameter_that_functions_return_is_not_the_second_calls() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2)

    def attend(layer: Called, x: Tensor) -> Any:
        weight = layer.linear.weight.contiguous().requires_grad_()
        return multi_head_attention_forward(
            *(x[:, None],) * 3, WIDTH, 2, attention.in_proj_weight, attention.in_proj_bias,
            None, None, False, 0.0, attention.out_proj.weight, attention.out_proj.bias,
        )[0] @ weight  # fmt: skip

    made, difference = tried(Called(attend), given())
    assert difference == ""
    made.sum().backward()
