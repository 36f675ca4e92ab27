"""calls.py: calls past the dispatcher and through it give the same, under any transform."""

from contextlib import nullcontext

import pytest
import torch
from storm_kernels import UsageError, scan
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

A, B = torch.rand(2, 5, 3), torch.randn(2, 5, 3)


class Quiet(TorchDispatchMode):
    """Changes nothing, and keeps the names of what it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    pass


def test_modes_subclasses_and_tensors_without_memory_are_taken_as_pytorch_takes_them():
    with Quiet() as quiet:
        scan.cumsum(A)
    assert any("cumsum" in name for name in quiet.seen)
    assert isinstance(scan.cumsum(A.as_subclass(Wrapped)), Wrapped)
    assert scan.cumsum(A.to("meta")).is_meta


def test_transforms_take_calls_apart():
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
    with torch.autocast("cpu", torch.bfloat16):
        assert func.vmap(ours)(A.bfloat16()).dtype == torch.float32


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


def test_negated_and_conjugate_views():
    twisted = torch.randn(2, 5, 3, dtype=torch.complex64).conj()
    plain = twisted.resolve_conj()
    h = scan.linear_scan(twisted, twisted)[0]
    torch.testing.assert_close(h, scan.linear_scan(plain, plain)[0])


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
