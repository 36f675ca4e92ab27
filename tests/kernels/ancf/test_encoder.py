"""encoder.py: remembers per layer, never at the price of a bit."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import ancf


@pytest.fixture
def encoder() -> ancf.Encoder:
    return ancf.Encoder()


def normal(count: int = 20_000) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_round_trip_and_statistics(encoder):
    tensor = normal()
    for _ in range(3):
        blob = encoder.encode(tensor, layer_id="mlp.0")
        assert torch.equal(encoder.decode(blob, layer_id="mlp.0"), tensor)
    stats = encoder.stats()["mlp.0"]
    assert stats.tensors == 3
    assert stats.raw_nbytes == 3 * tensor.nbytes
    assert stats.ratio == pytest.approx(blob.ratio)
    assert stats.modes == {"window": 3}
    assert 0.01 < stats.escape_rate < 0.05
    assert stats.encode_seconds > 0
    assert stats.decode_seconds > 0


def test_layers_are_kept_apart(encoder):
    encoder.encode(normal(), layer_id=1)
    encoder.encode(normal().relu(), layer_id=2)
    assert {key: value.modes for key, value in encoder.stats().items()} == {
        1: {"window": 1},
        2: {"sparse": 1},
    }


@pytest.mark.parametrize("caching", [True, False])
def test_a_layer_that_changes_gets_another_mode(encoder, caching):
    encoder.set_caching(caching)
    for tensor in (normal(), normal().relu(), torch.zeros(20_000).bfloat16(), normal()):
        blob = encoder.encode(tensor, layer_id="same")
        assert (
            blob.mode == ancf.encode(tensor).mode or blob.ratio >= 0.95 * ancf.encode(tensor).ratio
        )
        assert torch.equal(encoder.decode(blob), tensor)


def test_a_cached_mode_that_drifts_is_chosen_anew(encoder):
    mostly_zero = normal() * (torch.arange(20_000) % 10 == 0) + 0.0
    assert encoder.encode(mostly_zero, layer_id="x").mode == "sparse"
    assert encoder.encode(normal(), layer_id="x").mode == "window"


def test_a_layer_that_was_noise_is_compressed_again(encoder):
    noise = torch.randint(0, 256, (40_000,), generator=torch.Generator().manual_seed(0))
    tensors = [normal(), noise.to(torch.uint8).view(torch.bfloat16), normal()]
    modes = [encoder.encode(one, layer_id="x").mode for one in tensors]
    assert modes == ["window", "raw", "window"]


def test_a_layer_may_begin_with_nothing(encoder):
    tensors = [torch.empty(0), torch.empty(0), normal().float()]
    modes = [encoder.encode(tensor, layer_id="experts").mode for tensor in tensors]
    assert modes == ["raw", "raw", ancf.encode(tensors[-1]).mode]


def test_lossless_unless_told_otherwise(encoder):
    tensor = normal()
    assert encoder.verify_lossless(tensor)
    encoder.set_tolerance(0.05)
    assert not encoder.verify_lossless(tensor)
    lossy = encoder.decode(encoder.encode(tensor))
    assert 0 < (lossy.double() - tensor.double()).abs().max() <= 0.05
    encoder.set_tolerance(0.0)
    assert encoder.verify_lossless(tensor)


def test_unknown_policies_are_refused_at_once():
    with pytest.raises(ancf.UsageError, match="'bold'"):
        ancf.Encoder(policy="bold")


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_tolerances_that_make_no_sense_are_refused_at_once(encoder, tolerance):
    with pytest.raises(ancf.UsageError, match=f"tolerance {tolerance}"):
        ancf.Encoder(tolerance=tolerance)
    with pytest.raises(ancf.UsageError, match=f"tolerance {tolerance}"):
        encoder.set_tolerance(tolerance)
    assert encoder.verify_lossless(normal())


def test_refused_tensors_leave_the_statistics(encoder):
    encoder.set_tolerance(0.1)
    with pytest.raises(ancf.UsageError):
        encoder.encode(torch.arange(5), layer_id="ids")
    assert encoder.stats()["ids"].tensors == 0
