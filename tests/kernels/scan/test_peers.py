"""What other scans are tested with, in cases of our own: the same shapes and kinds of numbers.

accelerated-scan: channels before length, powers of two and awkward lengths. HGRN, as in
flash-linear-attention: gates close to one from log-sigmoids, an initial state. Mamba: a recurrence
per channel and state, discretised by a positive step, read out by a product.
"""

from __future__ import annotations

import pytest
import torch
from storm_kernels import backends, scan
from support.recurrences import recurrence
from torch.nn import functional

_LENGTHS = [32, 256, 4096, 8000, 16323]
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the fast backends are."""
    info = backends("scan")[request.param]
    if not info.available:
        pytest.skip(f"backend {info.name}: {info.detail}")
    return info.name


def _assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = _TOLERANCE[result.dtype]
    size = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        result.double(), expected.double(), rtol=tolerance, atol=tolerance * size
    )


def _by_numpy(a, b, grad):
    """The states and both gradients by the reference, in float64."""
    a, b = (one.detach().cpu().double().requires_grad_() for one in (a, b))
    h, _ = scan.linear_scan(a, b, dim=-1, backend="numpy")
    return (h, *torch.autograd.grad(h, (a, b), grad.cpu().double()))


@pytest.mark.parametrize(
    ("length", "dtype"),
    [(length, torch.float32) for length in _LENGTHS]
    + [(64, torch.bfloat16), (8000, torch.float16)],
)
def test_channels_before_length(device, length, dtype):
    shape = (1, 3, length) if length > 1 << 14 else (2, 5, length)
    a = (0.999 - 0.5 * torch.rand(shape, device=device)).to(dtype).requires_grad_()
    b = torch.randn(shape, device=device).to(dtype).requires_grad_()
    grad = torch.randn(shape, device=device).to(dtype)
    h, _ = scan.linear_scan(a, b, dim=-1)
    expected = _by_numpy(a, b, grad)
    for one, other in zip((h, *torch.autograd.grad(h, (a, b), grad)), expected, strict=True):
        _assert_near(one.cpu(), other)


@pytest.mark.parametrize(
    ("batch", "length", "width", "given_state", "dtype"),
    [
        (2, 256, 128, False, torch.float32),
        (2, 1000, 20, True, torch.float16),
        (1, 63, 7, True, torch.float32),
    ],
)
def test_gated_recurrence(device, batch, length, width, given_state, dtype):
    gates = functional.logsigmoid(torch.randn(batch, length, width, device=device))
    a = gates.div(16).exp().to(dtype).requires_grad_()
    b = ((1 - a.detach()) * torch.randn_like(a)).requires_grad_()
    initial = torch.randn(batch, width, device=device).to(dtype) if given_state else None
    h, last = scan.linear_scan(a, b, initial)
    wide = [one.detach().double().requires_grad_() for one in (a, b)]
    expected = recurrence(*wide, None if initial is None else initial.double())
    _assert_near(h, expected)
    _assert_near(last, expected[:, -1])
    grad = torch.randn_like(h)
    ours = torch.autograd.grad(h, (a, b), grad)
    for one, other in zip(ours, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        _assert_near(one, other)


@pytest.mark.parametrize(("length", "shared"), [(1, False), (128, True), (372, False)])
def test_selective_recurrence(device, length, shared):
    batch, width, states = 2, 4, 8
    step = functional.softplus(torch.randn(batch, width, length, device=device) - 1)
    u = torch.randn(batch, width, length, device=device)
    rates = -torch.rand(width, states, device=device)
    both = [torch.randn(batch, 1 if shared else width, states, length, device=device)
            for _ in range(2)]  # fmt: skip
    a = (step.unsqueeze(2) * rates[..., None]).exp()
    b = (step * u).unsqueeze(2) * both[0]
    h, _ = scan.linear_scan(a, b, dim=-1)
    y = (h * both[1]).sum(2)
    expected = (recurrence(a.double(), b.double(), dim=-1) * both[1].double()).sum(2)
    _assert_near(y, expected)
