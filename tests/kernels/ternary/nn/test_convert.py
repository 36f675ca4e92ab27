"""Converting a model: which layers, their bytes and errors."""

from __future__ import annotations

import pytest
import torch
from storm_kernels.ternary.nn import TernaryLinear, convert
from torch import nn


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Sequential(nn.ReLU(), nn.Linear(128, 10)))


def test_every_linear_layer_is_replaced_and_reported():
    found = model()
    first = found[0].weight.detach().clone()
    report = convert(found)
    assert [layer.name for layer in report.layers] == ["0", "1.1"]
    assert all(isinstance(found.get_submodule(one.name), TernaryLinear) for one in report.layers)
    layer = report.layers[0]
    assert layer.shape == (128, 64)
    assert layer.bytes_before == 4 * 128 * 64
    assert layer.bytes_after == 2 * 128 * 64 // 8 + 4 * 128
    rounded = found[0].tensor.to_float()
    assert layer.error == pytest.approx(float((first - rounded).norm() / first.norm()), rel=1e-5)
    assert 0 < layer.error < 1
    assert report.bytes_before == sum(one.bytes_before for one in report.layers)
    assert "128x64" in str(report)
    assert found(torch.randn(3, 64)).shape == (3, 10)


def test_some_layers_can_stay():
    for skip in (["1.1"], lambda name: name.startswith("1")):
        found = model()
        assert [layer.name for layer in convert(found, skip=skip).layers] == ["0"]
        assert type(found[1][1]) is nn.Linear


def test_smaller_groups_have_smaller_errors():
    errors = [
        sum(layer.error for layer in convert(model(), group=group).layers) for group in (None, 32)
    ]
    assert errors[1] < errors[0]


def test_a_layer_with_several_names_is_replaced_under_each():
    found = model()
    found.append(nn.ModuleDict({"same": found[0], "skipped": found[1][1]}))
    report = convert(found, skip=["2.skipped"])
    assert [layer.name for layer in report.layers] == ["0", "1.1"]
    assert found[2]["same"] is found[0]
    assert isinstance(found[0], TernaryLinear)
    assert type(found[2]["skipped"]) is nn.Linear


def test_a_converted_transformer_infers():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2
    )
    convert(encoder)
    x = torch.randn(2, 5, 32)
    expected = encoder(x)
    with torch.no_grad():
        assert torch.allclose(encoder.eval()(x), expected, atol=1e-5)
