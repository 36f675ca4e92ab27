"""calls.py: only what is no plain call passes through the dispatcher, and both give the same."""

from contextlib import nullcontext

import pytest
import torch
from storm_kernels import UsageError, scan
from storm_kernels.scan import operators
from storm_kernels.scan.calls import _plain_keys
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

A, B = torch.rand(2, 5, 3), torch.randn(2, 5, 3)


@pytest.fixture
def dispatched(monkeypatch):
    """Return the names of the operators that were called through the dispatcher."""
    names = []

    for name in ("cumsum", "fold", "linear_scan", "linear_scan_gradient"):
        operator = getattr(operators, name)

        def noted(*arguments, op=operator.op, name=name):
            names.append(name)
            return op(*arguments)

        monkeypatch.setattr(operator, "op", noted)
    return names


def calls(a, b):
    return [
        scan.cumsum(a),
        scan.associative_scan("max", a),
        scan.linear_scan(a, b)[0],
    ]


def test_plain_calls_do_not_pass_through_the_dispatcher(dispatched):
    calls(A, B)
    a, b = A.clone().requires_grad_(), torch.nn.Parameter(B)
    sum(one.sum() for one in calls(a, b)).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert dispatched == []


def test_a_first_call_in_inference_mode_decides_nothing(dispatched):
    _plain_keys.cache_clear()
    with torch.inference_mode():
        scan.cumsum(A)
    scan.cumsum(A)
    assert dispatched == []


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("context", "a"),
    [
        (Quiet(), A),
        (Watching(), A),
        (torch.autocast("cpu", torch.bfloat16), A),
        (nullcontext(), A.as_subclass(Wrapped)),
        (nullcontext(), A.to("meta")),
    ],
    ids=["dispatch mode", "function mode", "autocast", "subclass", "meta"],
)
def test_other_calls_do(context, a, dispatched):
    with context:
        scan.cumsum(a)
    assert dispatched == ["cumsum"]


def test_transforms_take_calls_apart(dispatched):
    def loss(function):
        return lambda x: function(x).square().sum()

    def ours(x):
        return scan.linear_scan(x, x, dim=0)[0]

    def plain(x):
        h = [x[0]]
        for one in x[1:]:
            h.append(one * h[-1] + one)
        return torch.stack(h)

    func = torch.func
    for transform in (
        lambda f: func.grad(loss(f))(A[0]),
        lambda f: func.vmap(func.grad(loss(f)))(A),
        lambda f: func.jacrev(func.jacrev(loss(f)))(A[0]),
        lambda f: func.vmap(f, in_dims=1, out_dims=1)(A),
    ):
        torch.testing.assert_close(transform(ours), transform(plain))
    assert dispatched == []
    with torch.autocast("cpu", torch.bfloat16):
        assert func.vmap(ours)(A.bfloat16()).dtype == torch.float32


def test_negated_and_conjugate_views_do(dispatched):
    twisted = torch.randn(2, 5, 3, dtype=torch.complex64).conj()
    h = scan.linear_scan(twisted, twisted)[0]
    torch.testing.assert_close(
        h, scan.linear_scan(twisted.resolve_conj(), twisted.resolve_conj())[0]
    )
    assert dispatched == ["linear_scan"]


def test_forward_mode_derivatives_are_refused():
    def cumsum(x):
        return scan.cumsum(x, 1)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(A, torch.ones_like(A))
        with pytest.raises(UsageError, match="reverse mode"):
            cumsum(dual)
        assert torch.equal(cumsum(B), B.double().cumsum(1).float())
    with pytest.raises(UsageError, match="jacrev"):
        torch.func.jvp(cumsum, (A,), (A,))
    with pytest.raises(UsageError, match="jacrev"):
        torch.func.jacfwd(cumsum)(A)
    expected = torch.func.jacrev(lambda x: x.cumsum(1))(A)
    torch.testing.assert_close(torch.func.jacrev(cumsum)(A), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_both_ways_give_the_same(reverse):
    results = []
    for context in (nullcontext(), Quiet()):
        a, b = A.double().requires_grad_(), B.double().requires_grad_()
        with context:
            h = scan.linear_scan(a, b, reverse=reverse)[0]
            first = torch.autograd.grad(h.square().sum(), (a, b), create_graph=True)
            second = torch.autograd.grad(sum(one.square().sum() for one in first), (a, b))
        results.append([h, *first, *second])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
