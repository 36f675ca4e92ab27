"""TernaryLinear: rounding, gradients, freezing, and what it keeps for the backward pass."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import UsageError
from storm_kernels.ternary.nn import TernaryLinear
from torch import nn

KINDS = ["float", "int8", "ternary"]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("activations", "group"), [*((kind, None) for kind in KINDS), ("int8", 32)]
)
def test_freezing_changes_no_more_than_rounding_does(activations, group):
    layer = TernaryLinear(70, 9, activations=activations, group=group)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 70)
    trained = layer(x).detach()
    assert layer.freeze() is layer.freeze()
    assert layer.frozen
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert torch.allclose(layer(x), trained, rtol=1e-5, atol=1e-5)
    assert layer(x).shape == (2, 5, 9)


@pytest.mark.parametrize("activations", KINDS)
def test_gradients_pass_through_a_frozen_layer(activations):
    layer = TernaryLinear(70, 8, activations=activations, group=32).freeze()
    x, out = torch.randn(2, 5, 70, requires_grad=True), torch.randn(2, 5, 8)
    layer(x).backward(out)
    assert torch.allclose(x.grad, out @ layer.tensor.to_float(), atol=1e-5)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_gradients_pass_straight_through(activations):
    layer = TernaryLinear(64, 8, activations=activations)
    x = torch.randn(16, 64, requires_grad=True)
    out = torch.randn(16, 8)
    layer(x).backward(out)
    assert torch.allclose(x.grad, out @ layer.tensor.to_float(), atol=1e-5)
    if activations == "float":
        assert torch.allclose(layer.weight.grad, out.T @ x.detach(), atol=1e-5)
    assert torch.allclose(layer.bias.grad, out.sum(0), atol=1e-5)


def test_ternary_activations_are_kept_in_two_bits():
    layer = TernaryLinear(256, 8, activations="ternary", bias=False)
    x, out = torch.randn(64, 256, requires_grad=True), torch.randn(64, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    of_x = [one for one in kept if one.data_ptr() != layer.weight.data_ptr()]
    planes = [one for one in of_x if one.dtype == torch.uint8]
    assert sum(one.nbytes for one in planes) == 2 * x.numel() // 8
    assert sum(one.nbytes for one in of_x) == 2 * x.numel() // 8 + 4 * x.shape[0]
    y.backward(out)
    sizes = x.detach().abs()
    beyond = sizes > 0.5 * sizes.mean(1, keepdim=True)
    scale = (sizes * beyond).sum(1, keepdim=True) / beyond.sum(1, keepdim=True)
    rounded = x.detach().sign() * beyond * scale
    assert torch.allclose(layer.weight.grad, out.T @ rounded, atol=1e-4)
    assert torch.allclose(x.grad, out @ layer.tensor.to_float(), atol=1e-4)


@pytest.mark.parametrize("activations", KINDS)
def test_it_learns(activations):
    """A teacher with ternary weights can be matched."""
    teacher = TernaryLinear(32, 4, bias=False, activations=activations).freeze()
    layer = TernaryLinear(32, 4, bias=False, activations=activations)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-2, weight_decay=0.0)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 32)
        loss = nn.functional.mse_loss(layer(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.4 * sum(losses[:20])


def test_from_linear_keeps_bias_mode_and_dtype():
    linear = nn.Linear(64, 8).bfloat16().eval()
    layer = TernaryLinear.from_linear(linear)
    assert layer.frozen
    assert not layer.training
    x = torch.randn(3, 64).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    expected = x.float() @ layer.tensor.to_float().T + linear.bias.float()
    assert torch.allclose(layer(x).float(), expected, atol=0.05)
    assert layer.tensor.nbytes == 2 * 64 * 8 // 8 + 4 * 8
    assert layer.bias.requires_grad
    assert not TernaryLinear.from_linear(linear.requires_grad_(False)).bias.requires_grad
    assert TernaryLinear.from_linear(nn.Linear(64, 8, bias=False)).bias is None


def test_a_layer_made_on_meta_is_initialised_like_any_other():
    made = TernaryLinear(70, 9, device="meta").to_empty(device="cpu")
    nn.init.constant_(made.weight, torch.nan)
    nn.init.constant_(made.bias, torch.nan)
    torch.manual_seed(1)
    made.reset_parameters()
    torch.manual_seed(1)
    assert torch.equal(made.weight, TernaryLinear(70, 9).weight)
    assert not made.bias.any()
    frozen = TernaryLinear.from_linear(nn.Linear(70, 9))
    before = frozen.bias.clone()
    frozen.reset_parameters()
    assert torch.equal(frozen.bias, before)


def test_state_dicts_hold_planes():
    layer = TernaryLinear.from_linear(nn.Linear(70, 5))
    state = layer.state_dict()
    assert set(state) == {"bit0", "bit1", "scale", "bias"}
    other = TernaryLinear.from_linear(nn.Linear(70, 5))
    other.load_state_dict(state)
    x = torch.randn(2, 70)
    assert torch.equal(other(x), layer(x))


def test_activations_and_inputs_that_it_has_not_are_refused():
    with pytest.raises(UsageError, match="'bool'"):
        TernaryLinear(3, 4, activations="bool")
    for layer in (TernaryLinear(70, 4), TernaryLinear(70, 4).freeze()):
        for shape in ((3, 71), (0, 71), (70, 1), ()):
            with pytest.raises(UsageError, match=r"x has shape \(.*\); give \(..., 70\)"):
                layer(torch.zeros(shape))


def test_rows_of_zeros_stay_zeros():
    for activations in ("int8", "ternary"):
        linear = nn.Linear(64, 8, bias=False)
        layer = TernaryLinear.from_linear(linear, activations=activations)
        assert not layer(torch.zeros(2, 64)).any()
