"""What layers are called in reports."""

from __future__ import annotations

import pytest
from storm_client.monitoring.layers import MODEL, layer_name


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("", MODEL),
        ("head", "head"),
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("12", "12"),
        ("encoder.block_2.3.0", "encoder.block_2.3"),
        ("model.norm.scale", "model"),
    ],
)
def test_a_layer_is_a_name_up_to_its_first_number(module: str, layer: str) -> None:
    assert layer_name(module) == layer
