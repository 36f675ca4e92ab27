"""semiseparable.py: the layer is what its formula says, in parallel, step by step and both ways."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import UsageError
from storm_kernels.nn import AdaptiveRankSemiseparable
from support.recurrences import recurrence

BATCH, LENGTH, WIDTH, RANK = 2, 21, 12, 5


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[False, True], ids=["plain", "decay"])
def layer(request: pytest.FixtureRequest) -> AdaptiveRankSemiseparable:
    return AdaptiveRankSemiseparable(WIDTH, RANK, 3, request.param).double()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)


def by_its_formula(layer: AdaptiveRankSemiseparable, x: torch.Tensor) -> torch.Tensor:
    """y = T(x) + W (V * scan(g * U)), written with a convolution and a loop."""
    projected = x @ layer.project.weight.T + layer.project.bias
    write, read = projected[..., :RANK], projected[..., RANK : 2 * RANK]
    complexity = projected[..., -1:].sigmoid()
    gate = (4 * (complexity * RANK - torch.arange(RANK) - 0.5)).sigmoid()
    keep = projected[..., 2 * RANK : -1].sigmoid() if layer.decay else torch.ones_like(write)
    memory = recurrence(keep, gate * write)
    taps = layer.taps.flip(0).T.unsqueeze(1)
    near = torch.nn.functional.conv1d(
        x.transpose(1, 2), taps, padding=layer.conv_size - 1, groups=WIDTH
    )[..., : x.shape[1]]
    return near.transpose(1, 2) + (read * memory) @ layer.out.weight.T


def test_results_and_gradients_are_the_formulas(layer, x):
    y, diagnostics = layer(x)
    expected, weight = by_its_formula(layer, x), torch.randn_like(x)
    torch.testing.assert_close(y, expected)
    parameters = list(layer.parameters())
    ours = torch.autograd.grad((y * weight).sum(), parameters)
    theirs = torch.autograd.grad((expected * weight).sum(), parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    assert diagnostics["used_fused_scan"] is True
    assert 0 < diagnostics["mean_rank"] <= RANK
    assert not diagnostics["mean_rank"].requires_grad


def test_pytorchs_own_scan_and_what_is_compiled_give_the_same(layer, x):
    plain = AdaptiveRankSemiseparable(WIDTH, RANK, 3, layer.decay, use_fused_scan=False).double()
    plain.load_state_dict(layer.state_dict())
    y, diagnostics = plain(x)
    assert diagnostics["used_fused_scan"] is False
    torch.testing.assert_close(y, layer(x)[0])
    torch.testing.assert_close(plain.forward_bidirectional(x)[0], layer.forward_bidirectional(x)[0])
    if layer.decay:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x)[0], y)


def test_steps_give_the_same_outputs(layer, x):
    expected, _ = layer(x)
    state, outputs = None, []
    for t in range(LENGTH):
        y, state = layer.step(x[:, t], state)
        outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), expected)
    assert state.memory.shape == (BATCH, RANK)


def test_later_positions_do_not_reach_earlier_ones(layer, x):
    y, _ = layer(x)
    changed = x.clone()
    changed[:, 11:] += 1
    torch.testing.assert_close(layer(changed)[0][:, :11], y[:, :11], rtol=0, atol=0)
    assert not torch.equal(layer(changed)[0][:, 11], y[:, 11])


def test_both_directions_see_all_and_mirror(layer, x):
    y, _ = layer.forward_bidirectional(x)
    mirrored, _ = layer.forward_bidirectional(x.flip(1))
    torch.testing.assert_close(mirrored.flip(1), y)
    changed = x.clone()
    changed[:, -1] += 1
    assert (layer.forward_bidirectional(changed)[0][:, 0] != y[:, 0]).any()
    alone = x[:, :1]
    torch.testing.assert_close(layer.forward_bidirectional(alone)[0], layer(alone)[0])


def _trained(penalty: float) -> tuple[float, float]:
    """Return mean rank and error after learning a moving sum, at a price for rank."""
    torch.manual_seed(0)
    layer = AdaptiveRankSemiseparable(8, 8, 2)
    optimizer = torch.optim.Adam(layer.parameters(), 2e-2)
    x = torch.randn(8, 16, 8)
    target = x.cumsum(1) / 4
    for _ in range(200):
        y, diagnostics = layer(x)
        error = (y - target).square().mean()
        (error + penalty * diagnostics["gate_penalty"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return diagnostics["mean_rank"].item(), error.item()


def test_a_layer_made_on_meta_is_initialised_like_any_other(layer):
    with torch.device("meta"):
        made = AdaptiveRankSemiseparable(WIDTH, RANK, 3, layer.decay)
    made.to_empty(device="cpu").double()
    for memory in (*made.parameters(), *made.buffers()):
        memory.data.fill_(torch.nan)
    torch.manual_seed(0)
    made.reset_parameters()
    torch.manual_seed(0)
    layer.reset_parameters()
    for one, other in zip(
        (*made.parameters(), *made.buffers()), (*layer.parameters(), *layer.buffers()), strict=True
    ):
        assert torch.equal(one, other)


def test_the_penalty_lowers_the_rank_in_use():
    free, _ = _trained(0.0)
    priced, _ = _trained(1.0)
    assert priced < 0.5 * free


def test_sizes_and_shapes_that_are_wrong_are_told(layer, x):
    for sizes in ((0, 4, 4), (4, 0, 4), (4, 4, 0)):
        with pytest.raises(UsageError, match="must be at least 1"):
            AdaptiveRankSemiseparable(*sizes)
    with pytest.raises(UsageError, match=r"\(batch, length, d_model\) with d_model=12"):
        layer(x[..., :3])
    with pytest.raises(UsageError, match=r"\(batch, d_model\)"):
        layer.step(x)
