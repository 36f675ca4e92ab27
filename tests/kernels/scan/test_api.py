"""api.py: every backend gives what the definition says, for all types, strides and lengths."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_kernels import UsageError, scan
from support.recurrences import recurrence, running

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
LENGTHS = (0, 1, 2, 31, 32, 33, 127, 509, 2053)


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    assert not result.isnan().any()
    error = (result.to(expected.dtype) - expected).abs().max().item() if result.numel() else 0.0
    size = expected.abs().max().item() if result.numel() else 1.0
    assert error <= TOLERANCE[result.dtype] * max(size, 1.0), (error, size)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums(backend, device, dtype):
    for length in LENGTHS:
        for shape, dim in (((3, length, 5), 1), ((5, length), -1), ((length, 40), 0)):
            x = torch.randn(shape, device=device).to(dtype)
            before = x.clone()
            for reverse, exclusive in product((False, True), repeat=2):
                result = scan.cumsum(x, dim, reverse, exclusive, backend=backend)
                assert result.dtype == dtype
                assert_close(result, running("add", x, dim, reverse, exclusive))
            assert torch.equal(x, before)
            assert torch.equal(scan.fused_associative_scan(x, dim), scan.cumsum(x, dim))
    x = torch.tensor(3.0, device=device, dtype=dtype)
    assert scan.cumsum(x, 0, backend=backend) == 3
    assert scan.cumsum(x, -1, exclusive=True, backend=backend) == 0
    assert scan.associative_scan("max", x, 0, backend=backend) == 3


def test_sums_of_integers_are_exact_and_wrap(backend, device):
    for dtype in (*INTEGERS, torch.bool):
        most = 2 if dtype == torch.bool else 100
        x = torch.randint(0, most, (3, 700, 5), device=device).to(dtype)
        result = scan.cumsum(x, 1, backend=backend)
        assert result.dtype == torch.int64
        assert torch.equal(result, x.cumsum(1))
        for wanted in (torch.int32, torch.float32):
            found = scan.cumsum(x, 1, dtype=wanted, backend=backend)
            assert torch.equal(found, x.cumsum(1, dtype=wanted)), (dtype, wanted)
    x = torch.full((4,), 100, dtype=torch.int8, device=device)
    wrapped = scan.associative_scan("add", x, 0, backend=backend)
    assert wrapped.tolist() == [100, -56, 44, -112]
    largest = torch.full((2,), 2**63 - 1, device=device)
    assert scan.cumsum(largest, 0, backend=backend).tolist() == [2**63 - 1, -2]


@pytest.mark.parametrize("op", scan.OPERATIONS)
def test_associative_operations(backend, device, op):
    for dtype, reverse in product(FLOATS, (False, True)):
        for shape, dim in (((3, 300, 5), 1), ((2, 1), 1), ((6, 1031), -1)):
            x = torch.randn(shape, device=device)
            x = (1 + x / 100 if op == "mul" else x).to(dtype)
            result = scan.associative_scan(op, x, dim, reverse, backend=backend)
            assert_close(result, running(op, x, dim, reverse))
    for dtype in INTEGERS if op != "logaddexp" else ():
        x = torch.randint(0, 3, (2, 77, 3), device=device).to(dtype)
        result = scan.associative_scan(op, x, 1, backend=backend)
        assert torch.equal(result, running(op, x, 1).to(dtype)), dtype


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
@pytest.mark.parametrize(("reverse", "given_state"), [(False, False), (True, True)])
def test_recurrence(backend, device, dtype, reverse, given_state):
    shapes = [case for n in LENGTHS for case in (((2, n, 5), 1), ((5, n), -1))]
    for shape, dim in shapes:
        a, b = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        a = a / a.abs().clamp_min(1)
        states = torch.Size(size for at, size in enumerate(shape) if at != dim % len(shape))
        initial = torch.randn(states, device=device).to(dtype) if given_state else None
        h, last = scan.linear_scan(a, b, initial, dim, reverse, backend=backend)
        assert h.dtype == last.dtype == dtype
        if shape[dim] == 0:
            expected = torch.zeros(states, device=device) if initial is None else initial
            assert torch.equal(last, expected.to(dtype))
            continue
        wide = torch.complex128 if dtype.is_complex else torch.float64
        state = None if initial is None else initial.to(wide)
        expected = recurrence(a.to(wide), b.to(wide), state, dim, reverse)
        assert_close(h, expected)
        assert torch.equal(last, h.select(dim, 0 if reverse else -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_sequences_and_their_gradients(backend, device, dtype):
    """Gates close to one, as in gated recurrences: against the reference in float64."""
    for shape, dim in (((2, 3, 8000), -1), ((2, 1000, 20), 1), ((1, 16_323), -1)):
        a = (0.999 - 0.5 * torch.rand(shape, device=device)).to(dtype).requires_grad_()
        b = torch.randn(shape, device=device).to(dtype).requires_grad_()
        weight = torch.randn(shape, device=device).to(dtype)
        h, _ = scan.linear_scan(a, b, dim=dim, backend=backend)
        found = (h, *torch.autograd.grad(h, (a, b), weight))
        wide = [one.detach().cpu().double().requires_grad_() for one in (a, b)]
        h, _ = scan.linear_scan(*wide, dim=dim, backend="numpy")
        expected = (h, *torch.autograd.grad(h, wide, weight.cpu().double()))
        for one, other in zip(found, expected, strict=True):
            tolerance = 4 * TOLERANCE[dtype]
            size = max(1.0, other.abs().max().item())
            torch.testing.assert_close(
                one.cpu().double(), other, rtol=tolerance, atol=tolerance * size
            )


def test_factors_are_broadcast_and_types_promoted(backend, device):
    b = torch.randn(2, 33, 4, device=device).half()
    for shape in ((4,), (33, 1), (2, 1, 1), (1,)):
        a = torch.rand(shape, device=device)
        h, _ = scan.linear_scan(a, b, backend=backend)
        assert h.dtype == torch.float32
        assert_close(h, recurrence(a.double(), b.double()))


def test_any_order_of_dimensions(backend, device):
    for order, dim in product(permutations(range(3)), range(3)):
        x = torch.randn(3, 37, 20, device=device).permute(order)
        result = scan.cumsum(x, dim, backend=backend)
        assert_close(result, running("add", x, dim))
        assert result.stride() == torch.empty_like(x).stride()
        a = torch.rand(20, 3, 37, device=device).permute(2, 0, 1).expand(37, 20, 3)
        a = a.permute([(1, 2, 0).index(at) for at in range(3)]).permute(order)
        h, _ = scan.linear_scan(a, x, dim=dim, backend=backend)
        assert_close(h, recurrence(a.double(), x.double(), dim=dim))


@st.composite
def strided(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Draw a view of 1 to 4 dimensions: permuted, sliced with steps, broadcast; and a dimension."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(sizes) - 1))
    sizes[dim] = draw(st.integers(0, 70))
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    starts = [draw(st.integers(0, 2)) for _ in sizes]
    order = draw(st.permutations(range(len(sizes))))
    base = torch.arange(1.0).new_empty(
        [start + size * step for start, size, step in zip(starts, sizes, steps, strict=True)]
    )
    base.copy_(torch.randn(base.shape, generator=torch.Generator().manual_seed(1)))
    slices = tuple(
        slice(start, start + size * step, step)
        for start, size, step in zip(starts, sizes, steps, strict=True)
    )
    view = base[slices].permute(order)
    if draw(st.booleans()):
        at = draw(st.integers(0, view.dim() - 1))
        view = view.narrow(at, 0, min(1, view.shape[at])).expand_as(view)
    return view, dim


@given(strided(), st.booleans(), st.booleans(), st.sampled_from(["cpu", "numpy"]))
def test_any_strides(drawn, reverse, exclusive, backend):
    x, dim = drawn
    result = scan.cumsum(x, dim, reverse, exclusive, backend=backend)
    torch.testing.assert_close(
        result.double(), running("add", x, dim, reverse, exclusive), rtol=1e-5, atol=1e-5
    )
    h, _ = scan.linear_scan(x.sigmoid(), x, dim=dim, reverse=reverse, backend=backend)
    if x.shape[dim]:
        expected = recurrence(x.sigmoid().double(), x.double(), None, dim, reverse)
        torch.testing.assert_close(h.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "shape"),
    [(float("nan"), (2, 300, 4)), (float("inf"), (2, 300)), (-float("inf"), (2, 300, 4))],
)
def test_nan_and_infinity_spread_from_where_they_are(backend, device, bad, shape):
    x = torch.randn(shape, device=device)
    x[1, 100] = bad
    result = scan.cumsum(x, 1, backend=backend)
    assert torch.equal(result[0].isfinite(), torch.ones_like(result[0], dtype=torch.bool))
    assert result[1, :100].isfinite().all()
    assert torch.equal(result[1, 100:].isnan(), (x.cumsum(1))[1, 100:].isnan())
    assert not result[1, 100:].isfinite().any()
    compensated = scan.cumsum(x, 1, compensated=True, backend=backend)
    assert torch.equal(compensated.isnan(), result.isnan())
    assert torch.equal(compensated.isinf(), result.isinf())
    h, _ = scan.linear_scan(torch.full_like(x, 0.5), x, backend=backend)
    assert h[0].isfinite().all()
    assert h[1, :100].isfinite().all()
    assert not h[1, 100:].isfinite().any()
    for op in ("max", "min", "logaddexp"):
        found = scan.associative_scan(op, x, 1, backend=backend)
        assert torch.equal(found.isnan(), running(op, x, 1).isnan()), op
        assert torch.equal(found.isinf(), running(op, x, 1).isinf()), op
    factors = torch.rand(1, 40, 3, device=device)
    start = torch.randn(1, 40, 3, device=device)
    h, _ = scan.linear_scan(factors, start, backend=backend)
    for place in (0, 1, 7, 16, 23, 39):
        infinite = factors.clone()
        infinite[:, place] = float("inf")
        found, _ = scan.linear_scan(infinite, start, backend=backend)
        torch.testing.assert_close(found[:, :place], h[:, :place], rtol=1e-4, atol=1e-4)
    opposite = torch.tensor([1.0, float("inf"), 2.0, -float("inf"), 3.0], device=device)
    result = scan.cumsum(opposite, 0, backend=backend)
    assert result.isinf().tolist() == [False, True, True, False, False]
    assert result.isnan().tolist() == [False, False, False, True, True]


def test_compensated_sums_keep_what_rounding_takes(backend, device):
    tiny = 1e-9 if backend == "cuda" else 1e-17  # hosts add float32 in float64 to begin with
    dtype = torch.float32 if backend == "cuda" else torch.float64
    x = torch.full((1 << 12,), tiny, dtype=dtype, device=device)
    x[0] = 1.0
    result = scan.cumsum(x, 0, compensated=True, backend=backend)[-1].item()
    assert abs(result - (1 + 4095 * tiny)) <= torch.finfo(dtype).eps
    exact = scan.cumsum(torch.tensor([1e30, 1.0, -1e30], dtype=dtype, device=device), 0,
                        compensated=True, backend=backend)  # fmt: skip
    assert exact[-1] == 1.0


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("length", [1 << 16, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_accuracy_at_many_values(backend, device, length, compensated):
    import numpy as np

    x = 100 * torch.randn(length)
    exact = np.cumsum(x.numpy().astype(np.longdouble))
    result = scan.cumsum(x.to(device), 0, compensated=compensated, backend=backend)
    error = np.abs(result.cpu().numpy() - exact)
    if compensated:
        ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.longdouble)
        assert (error / ulp).max() <= 2
    else:
        theirs = np.abs(torch.cumsum(x.to(device), 0).cpu().numpy() - exact)
        assert error.max() <= theirs.max()


def test_runs_give_the_same_bits(backend, device):
    x = torch.randn(2, 3001, 7, device=device)
    first = scan.cumsum(x, 1, backend=backend)
    states = scan.linear_scan(x.sigmoid(), x, backend=backend)[0]
    for _ in range(5):
        assert torch.equal(scan.cumsum(x, 1, backend=backend), first)
        assert torch.equal(scan.linear_scan(x.sigmoid(), x, backend=backend)[0], states)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: scan.cumsum(x, 2), "dim 2 is out of range for a tensor of 2"),
        (lambda x: scan.cumsum(x, -3), "dim -3"),
        (lambda x: scan.cumsum(x.cfloat(), 0), "x is torch.complex64"),
        (lambda x: scan.cumsum([1.0], 0), "x is a list"),
        (lambda x: scan.cumsum(x, 0, dtype=torch.bool), "dtype torch.bool"),
        (lambda x: scan.cumsum(x.to_sparse(), 0), "to_dense"),
        (lambda x: scan.cumsum(x, 0, backend="abacus"), "'abacus' is unknown"),
        (lambda x: scan.associative_scan("xor", x, 0), "op 'xor' is unknown; choose one of add"),
        (lambda x: scan.associative_scan("logaddexp", x.long(), 0), "x is torch.int64"),
        (lambda x: scan.linear_scan(x, x.long()), "b is torch.int64"),
        (lambda x: scan.linear_scan(x, x[:, :2]), "cannot be broadcast"),
        (lambda x: scan.linear_scan(x, x, x), "initial has shape"),
        (lambda x: scan.linear_scan(x.cfloat(), x.double()), "promote to torch.complex128"),
        (lambda x: scan.linear_scan(x, x.to("meta")), "move them"),
        (lambda x: scan.linear_scan(x[0, 0], x[0, 0]), "no dimension"),
    ],
)
def test_refusals_say_what_is_wrong(call, words):
    with pytest.raises(UsageError, match=words):
        call(torch.randn(3, 4))
