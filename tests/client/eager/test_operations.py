"""Functions that are recomputed: of C++, or with a form of their own that gives the same bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import pytest
import torch
from storm_client.eager import operations
from storm_client.eager.calls import Call
from storm_client.eager.operations import (
    EXPENSIVE,
    REPLAYABLE,
    bound,
    draws,
    is_bound,
    may_draw,
    read_by,
)
from support.training import seeded
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

X = partial(seeded, "cpu", 4, 6)

STATISTICS = X()[2].clone(), X()[3].square()

CALLS: list[Callable[[], Tensor]] = [
    lambda: functional.alpha_dropout(X(), 0.3, training=True),
    lambda: functional.alpha_dropout(X()),
    lambda: functional.batch_norm(X(), *STATISTICS, X()[0].clone(), X()[1].clone(), True, 0.2),
    lambda: functional.batch_norm(X(), *STATISTICS, eps=1e-3),
    lambda: functional.celu(X(), 0.5),
    lambda: functional.dropout(X()),
    lambda: functional.dropout(X(), 0.3, training=False),
    lambda: functional.dropout2d(X()[None, None], 0.3),
    lambda: functional.dropout3d(X()[None, None], p=0.3),
    lambda: functional.elu(X(), alpha=0.5),
    lambda: functional.feature_alpha_dropout(X(), training=True),
    lambda: functional.embedding(torch.tensor([[1, 3], [0, 1]]), X()),
    lambda: functional.embedding(torch.tensor([2]), X(), 1, scale_grad_by_freq=True),
    lambda: functional.glu(X()),
    lambda: functional.glu(X(), 0),
    lambda: functional.group_norm(X(), 2, X()[0].clone(), eps=1e-3),
    lambda: functional.hardsigmoid(X()),
    lambda: functional.hardswish(X()),
    lambda: functional.hardtanh(X(), -0.5, max_val=0.25),
    lambda: functional.layer_norm(X(), (6,), X()[0].clone(), X()[1].clone(), 1e-3),
    lambda: functional.layer_norm(X(), (6,)),
    lambda: functional.leaky_relu(X(), 0.2),
    lambda: functional.log_softmax(X(), -1),
    lambda: functional.log_softmax(X(), dim=0, dtype=torch.float64),
    lambda: functional.log_softmax(X()),
    lambda: functional.max_pool2d(X()[None], 2),
    lambda: functional.max_pool2d(X()[None], (2, 3), 1, padding=1, ceil_mode=True),
    lambda: functional.max_pool3d(X()[None, None], (1, 2, 2)),
    lambda: functional.mish(X()),
    lambda: functional.pad(X(), (1, 2), value=3.0),
    lambda: functional.pad(X(), [1, 2], "reflect"),
    lambda: functional.relu(X()),
    lambda: functional.relu6(X()),
    lambda: functional.rms_norm(X(), [6], X()[0].clone()),
    lambda: functional.rms_norm(X(), (6,), eps=1e-3),
    lambda: functional.selu(X()),
    lambda: functional.silu(X()),
    lambda: functional.softmax(X(), dim=1),
    lambda: functional.softmax(X()[None]),
    lambda: functional.softmin(X(), 0),
    lambda: functional.softmin(X(), dim=1, dtype=torch.float64),
    lambda: functional.softsign(X()),
    lambda: functional.tanhshrink(X()),
    lambda: functional.threshold(X(), 0.1, 2.0),
    lambda: torch.einsum("ij,kj->ik", X(), X()),
    lambda: torch.einsum("ij,kj->ik", [X(), X()]),
    lambda: X().abs() ** 0.5,
    lambda: 0.5 ** X(),
    lambda: 2 - X(),
    lambda: 2 / X(),
    lambda: torch.Tensor.__rmatmul__(X(), X().t()),
]


class Calls(TorchFunctionMode):
    """Notes the outermost calls of the table, as a step that is watched does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in REPLAYABLE:
            self.seen.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("call", CALLS)
def test_a_form_has_the_bits_of_the_function_that_it_stands_for(
    call: Callable[[], Tensor],
) -> None:
    state = torch.get_rng_state()
    with Calls() as calls:
        expected = call()
    torch.set_rng_state(state)
    function, arguments, options = calls.seen[-1]
    assert function in operations._BOUND
    assert is_bound(function, arguments, options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = bound(function)(*arguments, **options)
    assert torch.equal(made, expected)
    assert made.stride() == expected.stride()


@pytest.mark.parametrize("function", operations._PERHAPS_IN_PLACE)
def test_a_form_writes_in_place_where_its_function_does(function: Callable[..., Tensor]) -> None:
    numbers = (0.1, 2.0) if function is functional.threshold else ()
    given = X()
    assert bound(function)(given, *numbers, inplace=True) is given
    assert torch.equal(given, function(X(), *numbers, inplace=True))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("norm", [functional.batch_norm, torch.batch_norm, torch.instance_norm])
def test_a_norm_writes_to_its_statistics_once(norm: Callable[..., Tensor], trains: bool) -> None:
    x, statistics, nothing = (
        seeded("cpu", 4, 6, 3),
        [one.clone() for one in STATISTICS],
        (None,) * 2,
    )
    arguments = (x, *nothing, *statistics, trains, 0.1, 1e-5, False)
    if norm is functional.batch_norm:
        arguments = (x, *statistics, *nothing, trains, 0.1, 1e-5)
    made = norm(*arguments)
    written = [one.clone() for one in statistics]
    read, options = read_by(norm, arguments, {})
    assert torch.equal(bound(norm)(*read, **options), made)
    assert all(map(torch.equal, statistics, written))
    assert all(map(torch.equal, statistics, STATISTICS)) is not trains


def test_a_norm_whose_arguments_have_names_is_recomputed_if_they_are_understood() -> None:
    options = dict(zip(("running_mean", "running_var"), STATISTICS, strict=True))
    read, left = read_by(functional.batch_norm, (X(),), {**options, "training": True, "eps": 1e-3})
    assert torch.equal(
        bound(functional.batch_norm)(*read, **left),
        functional.batch_norm(X(), None, None, training=True, eps=1e-3),
    )
    assert not is_bound(functional.batch_norm, (), {"input": X()})
    assert not is_bound(torch.batch_norm, (X(), None, None), dict(options))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_each_form_is_tried() -> None:
    with Calls() as calls:
        for call in CALLS:
            call()
    assert {function for function, *_ in calls.seen} >= set(operations._BOUND)


def test_all_others_are_written_in_cpp() -> None:
    others = REPLAYABLE - set(operations._BOUND)
    written = BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
    assert all(isinstance(one, written) for one in others)
    assert set(operations._BOUND) <= REPLAYABLE


def test_what_is_chosen_by_measuring_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (seeded("cpu", 1, 1, 4, 4), seeded("cpu", 1, 1, 2, 2))
    assert is_bound(torch.conv2d, arguments, {})
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert not is_bound(torch.conv2d, arguments, {})
        assert is_bound(torch.mm, (), {})
    monkeypatch.setattr(operations, "tunes", lambda: True)
    assert not any(is_bound(product, ("", ""), {}) for product in EXPENSIVE)
    assert is_bound(torch.mul, (), {})


def test_what_reads_more_than_its_arguments_is_not_bound() -> None:
    x = X()
    assert is_bound(functional.embedding, (x, x), {})
    assert not is_bound(functional.embedding, (x, x), {"max_norm": 1.0})
    assert not is_bound(functional.embedding, (x, x, None, 1.0), {})
    assert is_bound(torch.einsum, ("ij,jk", x, x), {})
    assert not is_bound(torch.einsum, ("ij,jk,kl", x, x, x), {})
    assert not is_bound(torch.einsum, ("ij,jk,kl", [x, x, x]), {})
    assert not is_bound(torch.einsum, (x, [0, 1], x, [1, 2]), {})
    assert not is_bound(functional.pad, (x, (1, 1), "replicate"), {})
    assert not is_bound(functional.pad, (x, (1, 1)), {"mode": "replicate"})


def test_functions_that_draw_are_known() -> None:
    """PyTorch tags those that do."""
    for function in REPLAYABLE:
        packet = getattr(torch.ops.aten, function.__name__.strip("_"), None)
        overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
        is_tagged = any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
        is_one_of_features = function in {functional.dropout2d, functional.dropout3d}
        assert may_draw(function) == (is_tagged or is_one_of_features), function


def test_calls_that_draw_are_known() -> None:
    x = X()
    attention = functional.scaled_dot_product_attention
    assert not draws(attention, (x, x, x), {"dropout_p": 0.0})
    assert draws(attention, (x, x, x), {"dropout_p": 0.1})
    assert draws(attention, (x, x, x, None, 0.1), {})
    assert draws(functional.dropout, (x,), {})
    assert not draws(torch.mul, (x, 2), {})


def test_a_batch_is_not_brought_to_its_device_again() -> None:
    """Unless it is part of a graph; a number is no batch."""
    given, number = torch.ones(4), torch.tensor(2.0)
    brought = torch.empty(4, device="meta")
    assert Call(torch.Tensor.to, (given, "meta"), {}).brings(brought)
    assert not Call(torch.mul, (brought, number), {}).brings(brought)
    assert not Call(torch.Tensor.to, (given, "meta"), {}).brings(brought.requires_grad_())
