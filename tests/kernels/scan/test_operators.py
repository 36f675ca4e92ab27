"""operators.py: gradients of every order, torch.compile, vmap, autocast, whatever the strides."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import backends, scan
from storm_kernels.scan import operators
from support.recurrences import recurrence
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.library import opcheck

SHAPE = (2, 4, 2)
CUDA = backends("scan")["cuda"]
ONE_A_DEVICE = [
    "auto",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA.available, reason=CUDA.detail)],
    ),
]
"""For what the operators do before any backend is called."""


def _leaf(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def _check_gradients(function, *sources) -> None:
    assert gradcheck(function, sources)
    assert gradgradcheck(function, sources)


@pytest.mark.parametrize(
    ("reverse", "exclusive", "compensated", "dim"),  # each pair of options once
    [
        (False, False, False, 1),
        (False, True, True, 0),
        (True, False, True, 2),
        (True, True, False, 1),
    ],
)
def test_gradients_of_sums(backend, device, reverse, exclusive, compensated, dim):
    options = {"compensated": compensated, "backend": backend}
    _check_gradients(
        lambda x: scan.cumsum(x, dim, reverse, exclusive, **options), _leaf(*SHAPE, device=device)
    )


def test_gradients_of_associative_operations(backend, device):
    for at, op in enumerate(scan.OPERATIONS):
        _check_gradients(
            lambda x, op=op, at=at: scan.associative_scan(op, x, 1, at % 2 > 0, backend=backend),
            _leaf(*SHAPE, device=device),
        )


@pytest.mark.parametrize(
    ("reverse", "given_state", "dim"),
    [(False, False, 0), (False, True, 1), (True, False, 1), (True, True, 2)],
)
def test_gradients_of_the_recurrence(backend, device, reverse, given_state, dim):
    sources = [_leaf(*SHAPE, device=device) for _ in range(2)]
    if given_state:
        states = [size for at, size in enumerate(SHAPE) if at != dim]
        sources.append(_leaf(*states, device=device))

    def function(a, b, initial=None):
        return scan.linear_scan(a, b, initial, dim, reverse, backend=backend)

    _check_gradients(function, *sources)


@pytest.mark.parametrize(("dtype", "reverse"), [(torch.float32, False), (torch.complex64, True)])
def test_first_and_second_gradients_are_a_loops(backend, device, dtype, reverse):
    sources = [_leaf(2, 40, 3, dtype=dtype, device=device) for _ in range(2)]
    sources.append(_leaf(2, 3, dtype=dtype, device=device))
    weight = torch.randn(2, 40, 3, dtype=dtype, device=device)

    def gradients(function):
        a, b, initial = sources
        first = grad((function(0.5 * a, b, initial) * weight).abs().sum(), sources,
                     create_graph=True)  # fmt: skip
        second = grad(sum(one.abs().square().sum() for one in first), sources)
        return (*first, *second)

    ours = gradients(lambda a, b, i: scan.linear_scan(a, b, i, 1, reverse, backend=backend)[0])
    theirs = gradients(lambda a, b, i: recurrence(a, b, i, 1, reverse))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def test_gradients_where_they_are_special(backend, device):
    """Products with zeros, equal extrema, minus infinity."""
    x = torch.tensor([2.0, 0.0, 3.0, 0.0, 4.0], dtype=torch.float64, device=device)
    _check_gradients(
        lambda x: scan.associative_scan("mul", x, 0, backend=backend), x.requires_grad_()
    )
    x = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0], device=device, requires_grad=True)
    ours = grad(scan.associative_scan("max", x, 0, backend=backend).sum(), x)[0]
    theirs = grad(x.cummax(0).values.sum(), x)[0]
    assert torch.equal(ours, theirs)
    x = torch.tensor([-float("inf"), 1.0, 2.0], device=device, requires_grad=True)
    ours = grad(scan.associative_scan("logaddexp", x, 0, backend=backend)[2], x)[0]
    assert ours[0] == 0
    torch.testing.assert_close(ours[1:], x[1:].detach().softmax(0))


def test_gradients_of_any_strides(backend, device):
    a, b = (torch.randn(2, 3, 37, device=device).sigmoid().requires_grad_() for _ in range(2))
    incoming = torch.randn(37, 2, 3, device=device).permute(1, 0, 2)

    def gradients(function):
        h = function(a.transpose(1, 2), b.transpose(1, 2))
        return grad(h, (a, b), incoming)

    ours = gradients(lambda a, b: scan.linear_scan(a, b, backend=backend)[0])
    for one, other in zip(ours, gradients(recurrence), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    x = torch.randn(3, 20, device=device, requires_grad=True)
    one = torch.ones((), device=device).expand(3, 20)
    assert torch.equal(
        grad(scan.cumsum(x, 1, backend=backend), x, one)[0],
        torch.arange(20.0, 0, -1, device=device).expand(3, 20),
    )


def test_half_precision_gradients_have_their_inputs_types(backend, device):
    a, b = (_leaf(2, 9, 4, dtype=torch.bfloat16, device=device) for _ in range(2))
    h, _ = scan.linear_scan(a.sigmoid(), b, backend=backend)
    for one in grad(h.float().sum(), (a, b)):
        assert one.dtype == torch.bfloat16
    x = _leaf(2, 9, dtype=torch.bfloat16, device=device)
    sums = scan.cumsum(x, 1, dtype=torch.float32, backend=backend)
    assert grad(sums.sum(), x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ONE_A_DEVICE)
def test_the_operators_keep_torchs_rules(backend, device):
    shape = (2, 5, 3)

    def leaf(*sizes):
        return torch.randn(sizes, device=device, requires_grad=True)

    x, state = leaf(*shape), leaf(shape[0], shape[2])
    opcheck(operators.cumsum.op, (x, 1, False, True, False, None, backend))
    turned = leaf(0, 2, 3).transpose(0, 1)
    opcheck(operators.cumsum.op, (turned, 0, True, False, False, torch.float64, backend))
    opcheck(operators.fold.op, (x, "mul", 1, False, backend))
    opcheck(operators.linear_scan.op, (x, leaf(*shape), state, 1, True, backend))
    opcheck(
        operators.linear_scan_gradient.op, (x, leaf(*shape), leaf(*shape), None, 1, False, backend)
    )


@pytest.mark.parametrize("backend", ONE_A_DEVICE)
def test_compiles_without_a_graph_break(backend, device):
    def function(a, b):
        h, last = scan.linear_scan(a, b, dim=-2, backend=backend)
        sums = scan.cumsum(h.transpose(0, 1), 1, reverse=True, backend=backend)
        top = scan.associative_scan("max", sums, 0, backend=backend)
        return (top.square().sum() + last.sum()) * h.mean()

    sources = [torch.rand(2, 30, 4, device=device, requires_grad=True) for _ in range(2)]
    expected = grad(function(*sources), sources)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for one, other in zip(grad(compiled(*sources), sources), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_vmap_scans_each_by_itself(backend, device):
    a, b = (torch.rand(4, 7, 3, device=device) for _ in range(2))
    initial = torch.rand(3, device=device)

    def function(a, b):
        return scan.linear_scan(a, b, initial, dim=0, backend=backend)[0]

    together = torch.func.vmap(function, in_dims=(0, 0))(a, b)
    torch.testing.assert_close(
        together, torch.stack([function(*one) for one in zip(a, b, strict=True)])
    )
    along = torch.func.vmap(function, in_dims=(None, 1), out_dims=1)(a[0], b.transpose(0, 1))
    torch.testing.assert_close(along, torch.stack([function(a[0], one) for one in b], 1))
    for way in (
        lambda x: scan.cumsum(x, -1, True, backend=backend),
        lambda x: scan.associative_scan("max", x, 0, backend=backend),
    ):
        torch.testing.assert_close(
            torch.func.vmap(way, in_dims=1)(b), torch.stack([way(one) for one in b.unbind(1)])
        )


def test_autocast_makes_sums_in_float32(backend, device):
    x = torch.randn(2, 9, 4, device=device).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        assert scan.cumsum(x, backend=backend).dtype == torch.float32
        assert scan.linear_scan(x, x, backend=backend)[0].dtype == torch.float32
        assert scan.associative_scan("max", x, backend=backend).dtype == torch.float32
        assert scan.cumsum(x.double(), backend=backend).dtype == torch.float64
        assert scan.cumsum(x.long(), backend=backend).dtype == torch.int64
    assert scan.cumsum(x, backend=backend).dtype == torch.bfloat16
