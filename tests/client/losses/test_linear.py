"""The loss of a head without its logits: close to the plain one, repeatable, and small."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import storm_client as storm
import torch
import torch.nn.functional as F
from storm_client.errors import UsageError
from storm_client.losses import linear as linear_loss
from support.peak_memory import peak_bytes
from support.steps import descended
from torch import Tensor

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "SLICE_BYTES", 4096)


def make(
    dtype: torch.dtype, device: str = "cpu", rows: tuple[int, ...] = (3, 7), classes: int = 1000
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden, weight, target and bias."""
    torch.manual_seed(5)
    hidden = torch.randn(*rows, 16).to(device, dtype).requires_grad_()
    weight = torch.randn(classes, 16).to(device, dtype).requires_grad_()
    bias = torch.randn(classes).to(device, dtype).requires_grad_()
    target = torch.randint(classes, rows)
    target.view(-1)[::5] = -100
    return hidden, weight, target.to(device), bias


def plain(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the same of PyTorch's own functions, with logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), class_weight, **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_the_plain_ones(
    device: str, dtype: torch.dtype, biased: bool
) -> None:
    hidden, weight, target, bias = make(dtype, device)
    inputs = [hidden, weight, bias] if biased else [hidden, weight]
    class_weight = torch.rand(1000, device=device, dtype=dtype)
    for reduction, smoothing, weighted in product(("mean", "sum", "none"), (0.0, 0.2), (0, 1)):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        wide = class_weight.to(torch.promote_types(dtype, torch.float32)) if weighted else None
        expected = plain(hidden, weight, target, bias if biased else None, wide, **options)
        options["class_weight"] = class_weight if weighted else None
        found = storm.linear_cross_entropy(hidden, weight, target, *inputs[2:], **options)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        outer = torch.rand_like(expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, inputs, outer),
            torch.autograd.grad(expected, inputs, outer),
            **TOLERANCE[dtype],
        )


def test_derivatives_are_right() -> None:
    hidden, weight, target, bias = make(torch.float64, rows=(4,), classes=300)
    for options in ({}, {"reduction": "none", "label_smoothing": 0.1}):

        def loss(*given: Tensor, options: dict[str, Any] = options) -> Tensor:
            return storm.linear_cross_entropy(given[0], given[1], target, given[2], **options)

        assert torch.autograd.gradcheck(loss, (hidden, weight, bias), fast_mode=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_second_derivative_is_refused_whatever_it_is_asked_for(
    first: int, smoothing: float
) -> None:
    """No term of it is missing, and none is None."""
    hidden, weight, target, bias = make(torch.float32)
    matrix, scale = torch.eye(16, requires_grad=True), torch.ones((), requires_grad=True)
    logits = hidden @ matrix
    options = {"label_smoothing": smoothing}
    loss = storm.linear_cross_entropy(logits, weight, target, bias, **options) * scale
    inputs = [hidden, weight, bias, matrix]
    (gradient,) = torch.autograd.grad(loss, inputs[first], create_graph=True)
    for one in (*inputs, scale):
        with pytest.raises(RuntimeError, match=r"linear_cross_entropy\(\) is not supported; .*log"):
            torch.autograd.grad(gradient.sum(), one, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative of linear"):
        gradient.square().sum().backward()


def test_a_gradient_with_a_graph_is_the_same() -> None:
    hidden, weight, target, bias = make(torch.bfloat16)
    loss = storm.linear_cross_entropy(hidden, weight, target, bias)
    inputs = [hidden, weight, bias]
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, inputs)))


def test_runs_repeat_each_other(device: str) -> None:
    results = []
    for _ in range(3):
        hidden, weight, target, bias = make(torch.bfloat16, device, (50,), 5000)
        loss = storm.linear_cross_entropy(hidden, weight, target, bias)
        results.append((loss, *torch.autograd.grad(loss, [hidden, weight, bias])))
    for again in results[1:]:
        assert all(map(torch.equal, results[0], again))


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, target, bias = make(torch.float32)
    loss = storm.linear_cross_entropy(hidden, weight.detach(), target, bias.detach())
    loss.backward()
    assert hidden.grad is not None
    loss = storm.linear_cross_entropy(hidden.detach(), weight, target)
    loss.backward()
    expected = torch.autograd.grad(plain(hidden, weight, target), weight)[0]
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_infinities_come_out_where_plain_ones_do(number: float) -> None:
    hidden, weight, target, bias = make(torch.float32)
    with torch.no_grad():
        bias[200:] = number
        hidden[0, 1] = number
    found, expected = (
        loss(hidden, weight, target, bias, reduction="none")
        for loss in (storm.linear_cross_entropy, plain)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("rows", [(), (5,), (2, 3, 4), (0,)])
def test_hidden_may_have_any_dimensions(rows: tuple[int, ...]) -> None:
    hidden, weight, target, _ = make(torch.float32, rows=(max(rows, default=1) or 1,))
    hidden, target = torch.randn(*rows, 16), torch.zeros(rows, dtype=torch.long)
    for reduction in ("mean", "none"):
        found = storm.linear_cross_entropy(hidden, weight, target, reduction=reduction)
        if rows:
            expected = plain(hidden, weight, target, reduction=reduction)
        else:
            expected = F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_autocast_casts_as_it_does_for_a_linear_layer(device: str) -> None:
    hidden, weight, target, bias = make(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = storm.linear_cross_entropy(hidden, weight, target, bias)
        expected = plain(hidden, weight, target, bias)
        gradients = torch.autograd.grad(found, [hidden, weight, bias])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    others = torch.autograd.grad(expected, [hidden, weight, bias])
    torch.testing.assert_close(gradients, others, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(9, 15)}, "weight must be"),
        ({"weight": torch.ones(0, 16)}, "classes"),
        ({"weight": torch.ones(9, 16, dtype=torch.float64)}, "one type"),
        ({"target": torch.zeros(4, dtype=torch.long)}, "target must have"),
        ({"target": torch.zeros(5)}, "target must be int64"),
        ({"bias": torch.ones(8)}, "bias must be"),
        ({"class_weight": torch.ones(8)}, "class_weight must be"),
        ({"class_weight": torch.ones(9, requires_grad=True)}, "no gradient"),
        ({"label_smoothing": 1.5}, "label_smoothing must be"),
        ({"label_smoothing": "a"}, "got label_smoothing='a': label_smoothing must be a number"),
        ({"label_smoothing": None}, "got label_smoothing=None: label_smoothing must be a number"),
        ({"ignore_index": 1.5}, "got ignore_index=1.5: ignore_index must be an integer"),
        ({"ignore_index": None}, "got ignore_index=None: ignore_index must be an integer"),
        ({"ignore_index": 1 << 63}, "ignore_index must be an integer that fits int64"),
        ({"reduction": "average"}, "reduction must be"),
        ({"hidden": torch.ones(5, 16, dtype=torch.long)}, "hidden must be"),
        ({"hidden": torch.ones(16)}, r"got hidden \(16,\) torch.float32 cpu, weight \(9, 16\)"),
        ({"hidden": 5}, "got 5 as hidden: pass a tensor"),
        ({"bias": "none"}, "got 'none' as bias: pass a tensor"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(change: dict[str, Any], said: str) -> None:
    given = {
        "hidden": torch.ones(5, 16),
        "weight": torch.ones(9, 16),
        "target": torch.zeros(5, dtype=torch.long),
    }
    with pytest.raises(UsageError, match=said):
        storm.linear_cross_entropy(**(given | change))


def test_a_target_that_is_no_class_is_an_index_error() -> None:
    target = torch.tensor([3, 9])
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        storm.linear_cross_entropy(torch.ones(2, 16), torch.ones(9, 16), target)


def test_a_captured_step_does_the_same(client: storm.Client) -> None:
    """It has no content to check targets by; the loss itself rejects them."""

    def trained(client: storm.Client | None) -> list[Tensor]:
        hidden, weight, target, bias = make(torch.float32)
        hidden = hidden.detach()

        def loss_of(target: Tensor) -> Tensor:
            return storm.linear_cross_entropy(hidden, weight, target, bias, label_smoothing=0.1)

        return descended(loss_of, [weight, bias], target, client=client, refused=[1000, -3])

    assert all(map(torch.equal, trained(client), trained(None)))


def test_a_compiler_gets_the_plain_operations() -> None:
    hidden, weight, target, bias = make(torch.float32)
    compiled = torch.compile(storm.linear_cross_entropy, backend="eager", fullgraph=True)
    for reduction in ("mean", "none"):
        found = compiled(hidden, weight, target, bias, reduction=reduction)
        torch.testing.assert_close(found, plain(hidden, weight, target, bias, reduction=reduction))


def test_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, classes, width = 200, 12_800, 16
    monkeypatch.setattr(linear_loss, "SLICE_BYTES", rows * 128 * 4)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width, requires_grad=True)
    target = torch.randint(classes, (rows,))
    few, one = 100 * rows, rows * 128 * 4
    made: list[Tensor] = []

    def forward() -> None:
        made.append(storm.linear_cross_entropy(hidden, weight, target))

    assert peak_bytes(forward) <= 3 * one + few
    gradients = weight.nbytes + 2 * hidden.nbytes
    assert peak_bytes(made[0].backward) <= gradients + 4 * one + few
    assert few + 4 * one < rows * classes * 4 / 10  # what logits would have taken
