"""A recipe computes what its operation computed, whatever the thread is in when it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from storm_client.eager.bits import checksum, copied, same_bits
from storm_client.eager.recompute import Input, Pins, Recipe, RecipeResult, Result
from storm_client.eager.sources import Alias
from storm_client.errors import ActivationLost
from storm_client.saved.versions import SavedVersion, View
from support.altering_modes import ScaledBelow, SteeperSlopes
from support.thread_counts import omp_threads, one_thread
from support.training import seeded
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from tests.client.eager.test_settings import (
    OTHERS,
    in_a_new_thread,
    overridden,
    small_numbers_as_zero,
)

MANY = 1 << 17
"""Elements, which PyTorch shares among threads."""


def recipe_of(function: Callable[..., Any], *tensors: Tensor, device: str = "cpu") -> Recipe:
    inputs = [Input(Alias.of(one), one.requires_grad) for one in tensors]
    return Recipe(function, inputs, {}, device)


def packs(log: list[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    def pack(tensor: Tensor) -> Tensor:
        log.append(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def test_what_is_still_held_is_recomputed_for_what_is_made_from_it() -> None:
    """It may have been written to uncounted. In other steps it is not held."""
    x, factor, pins = seeded("cpu", 8, 8), [2.0], Pins()

    def scaled(x: Tensor) -> Tensor:
        return x * factor[0]

    held = scaled(x)
    pin = pins.add(held.untyped_storage())
    result = Result(held, pin, pins)
    result.made_by(recipe_of(scaled, x), None, b"a way")
    source = RecipeResult(result, View.of(held), SavedVersion.of(held, pin.address))
    made = held.exp()
    tried = Result(made, pins.add(made.untyped_storage()), pins)
    tried.made_by(
        Recipe(torch.exp, [Input(source, requires_grad=False)], {}, "cpu"), None, b"a way"
    )
    factor[0] = 3.0
    assert torch.equal(tried.made(), scaled(x).exp())


def test_what_a_backward_pass_gets_shares_memory_as_long_as_it_holds_some() -> None:
    """A function may write to one of its saved tensors and read another."""
    x, pins = seeded("cpu", 8, 8), Pins()
    made = x.exp()
    result = Result(made, pins.add(made.untyped_storage()), pins)
    result.made_by(recipe_of(torch.exp, x), None, b"a way")
    views = [(View.of(one), SavedVersion.of(one, 0)) for one in (made[:4], made)]
    del made
    part, whole = (result.unpacked(*one) for one in views)
    part.data.zero_()
    assert not whole[:4].any()
    del part, whole
    assert torch.equal(result.unpacked(*views[1]), x.exp())


def test_each_backward_pass_recomputes_anew() -> None:
    """Something may have been written uncounted since the pass before; a trial has to notice."""
    x, factor, pins = seeded("cpu", 8, 8), [2.0], Pins()

    def scaled(x: Tensor) -> Tensor:
        return x * factor[0]

    made = scaled(x)
    result = Result(made, pins.add(made.untyped_storage()), pins)
    result.made_by(recipe_of(scaled, x), None, b"a way")
    for _ in range(3):
        result.expect_use()
    found: list[Tensor] = []
    leaf = seeded("cpu", 2, grad=True)
    loss = leaf.sin().sum()
    loss.register_hook(lambda _: found.append(result.tried()))
    for number in (2.0, 3.0):
        factor[0] = number
        loss.backward(retain_graph=True)
        assert torch.equal(found.pop(), scaled(x))


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.enable_grad,
        SteeperSlopes,
        ScaledBelow,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_the_thread_is_in_alters_nothing(
    around: Callable[[], AbstractContextManager[object]], dtype: torch.dtype | None
) -> None:
    x, weight = seeded("cpu", 8, 16), nn.Parameter(seeded("cpu", 16, 16))
    cast = torch.autocast("cpu", dtype) if dtype else nullcontext()
    with cast:
        expected = [torch.nn.functional.linear(x, weight), silu(x)]
        recipes = [recipe_of(torch.nn.functional.linear, x, weight), recipe_of(silu, x)]
    with around():
        stack = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        made = [recipe.run() for recipe in recipes]
        assert stack == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one, other)
        assert one.dtype is other.dtype
        assert not one.requires_grad


def test_casts_that_autocast_keeps_stay() -> None:
    """Without them a forward pass that goes on in another thread would add gradients otherwise."""
    x, weight = seeded("cpu", 8, 16), nn.Parameter(seeded("cpu", 16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        recipe = recipe_of(torch.mm, x, weight)
    kept = []

    def forward(begun: threading.Barrier) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            first = x @ weight
            begun.wait(60)
            begun.wait(60)
            second = x @ weight
        kept.append(cast_of(first) is cast_of(second))

    def cast_of(product: Tensor) -> object:
        return product.grad_fn.next_functions[1][0]

    begun = threading.Barrier(2)
    thread = threading.Thread(target=forward, args=[begun])
    thread.start()
    begun.wait(60)
    recipe.run()
    begun.wait(60)
    thread.join()
    assert kept == [True]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_kernels_are_chosen_by_what_needed_a_gradient(
    needs_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`matmul` folds a batch by that, and attention and convolutions choose by it."""
    seen: list[tuple[bool, Sequence[bool]]] = []

    def product(*tensors: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), [one.requires_grad for one in tensors]))
        return torch.matmul(*tensors)

    x = seeded("cpu", 6, 4, 8).transpose(0, 1)
    weight = nn.Parameter(seeded("cpu", 8, 8), requires_grad=needs_grad)
    recipe = recipe_of(product, x, weight)
    log: list[Tensor] = []
    with torch.no_grad(), packs(log):
        made = recipe.run()
    assert seen == [(True, [False, needs_grad])]
    assert not made.requires_grad
    assert not log
    assert torch.equal(made, torch.matmul(x, weight))


DECIDING_ALL = {"default dtype", "oneDNN"}
"""What decides the bits of functions that are neither products nor attention, too."""

OF_ATTENTION = {"attention", "order of attention", "sums in attention"}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("function", [silu, torch.mm, scaled_dot_product_attention])
def test_other_settings_raise_where_they_decide(name: str, function: Callable[..., Tensor]) -> None:
    tensors = [seeded("cpu", 8, 8)] * {silu: 1, torch.mm: 2}.get(function, 3)
    recipe = recipe_of(function, *tensors)
    decide = {silu: DECIDING_ALL, torch.mm: OTHERS.keys() - OF_ATTENTION}.get(function, OTHERS)
    with OTHERS[name](), pytest.raises(ActivationLost) if name in decide else nullcontext():
        recipe.run()
    assert torch.equal(recipe.run(), function(*tensors))


@pytest.mark.parametrize(
    ("other", "name"),
    [(overridden, "overridden operators"), (small_numbers_as_zero, "small numbers as zero")],
)
def test_other_kernels_and_numbers_raise(
    other: Callable[[], AbstractContextManager[object]], name: str
) -> None:
    recipe = recipe_of(silu, seeded("cpu", 8, 8))
    with other(), pytest.raises(ActivationLost, match=f"to be recomputed: {name}; have them"):
        recipe.run()


def test_a_result_without_a_recipe_that_was_changed() -> None:
    """What is made from it cannot be recomputed, though the gradient may not need it."""
    tensor = seeded("cpu", 8, 8)
    result = Result(tensor, (pins := Pins()).add(tensor.untyped_storage()), pins)
    version = SavedVersion.of(tensor, tensor.untyped_storage()._cdata)
    source = RecipeResult(result, View.of(tensor), version)
    assert torch.equal(source.tensor(), tensor)
    tensor.add_(1)
    with pytest.raises(ActivationLost, match=r"shape \[8, 8\] was changed in place"):
        source.tensor()


def test_another_thread_raises_on_a_cpu_and_is_left_as_it_is() -> None:
    recipe = recipe_of(silu, torch.ones(MANY))

    def run() -> tuple[int, int]:
        before = omp_threads()
        with pytest.raises(ActivationLost, match="the thread itself"):
            recipe.run()
        return before, omp_threads()

    with one_thread():
        before, after = in_a_new_thread(run)
    assert before == after


def test_a_copy_lies_in_memory_as_the_tensor_does() -> None:
    base = seeded("cpu", 8, 12)
    for tensor in (base[:, 3:9], base.t()[2:], base[0].expand(5, 12), base[1:2, ::5]):
        copy = copied(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.storage_offset() == tensor.storage_offset()
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("nbytes", [MANY * 4, MANY * 4 + 3])
def test_what_is_compared_and_copied_leaves_a_new_thread_as_it_is(nbytes: int) -> None:
    def work() -> tuple[int, int]:
        before = omp_threads()
        one = torch.UntypedStorage(nbytes)
        tensor = torch.empty(0, dtype=torch.uint8).set_(one)
        other = copied(tensor)
        assert same_bits(one, other.untyped_storage())
        assert torch.equal(checksum(one), checksum(other.untyped_storage()))
        return before, omp_threads()

    with one_thread():
        before, after = in_a_new_thread(work)
    assert before == after


@pytest.mark.parametrize("nbytes", [1 << 15, (1 << 15) + 3, 5])
def test_a_checksum_notices_each_change(nbytes: int) -> None:
    storage = torch.UntypedStorage(nbytes)
    words = torch.empty(0, dtype=torch.uint8).set_(storage)
    words.copy_(torch.arange(nbytes) % 251)
    expected = checksum(storage)
    for place in (0, nbytes // 2, nbytes - 1):
        words[place] += 1
        assert not torch.equal(checksum(storage), expected)
        words[place] -= 1
    if nbytes > 8:
        first, last = words[:1].clone(), words[-1:].clone()
        words[:1], words[-1:] = last, first
        assert not torch.equal(checksum(storage), expected)
