"""hopper.py: what it takes, and on a GPU the whole of a product."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import ancf, backends, gemm
from storm_kernels.ancf.dtypes import dtype_of
from storm_kernels.gemm import hopper, reference
from storm_kernels.gemm.activations import activate
from torch import Tensor
from torch.nn import functional

INFO = backends("gemm")["cuda"]
on_gpu = pytest.mark.skipif(not INFO.available, reason=INFO.detail)
SHAPES = [
    # rows, columns, depth: whole tiles; a few rows; depth that ends within a step; many tiles
    (256, 256, 256),
    (1, 128, 64),
    (130, 384, 72),
    (1000, 1152, 520),
    (4096, 2816, 1024),
]
DTYPES = [torch.bfloat16, torch.float16]


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    return normal(rows, depth), normal(columns, depth) / depth**0.5, normal(columns, depth) / 8


def check_close(found: Tensor, expected: Tensor) -> None:
    """Compare with float32's result: the rounding of one operation apart."""
    assert found.isfinite().all()
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 2 * torch.finfo(found.dtype).eps


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("cluster", "lead"), [(1, 3), (2, 0), (2, 3)])
def test_products(shape: tuple[int, int, int], dtype: torch.dtype, cluster: int, lead: int) -> None:
    tiling = hopper.Tiling(cluster, lead=lead)
    x, weight, other = operands(*shape, dtype)
    bias = other[:, 0].contiguous()
    y, none = hopper.product(x, weight, bias, tiling=tiling)
    assert none is None
    check_close(y, functional.linear(x.float(), weight.float(), bias.float()))
    assert torch.equal(hopper.product(x, weight, bias, tiling=tiling)[0], y)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_encoded_as_they_are_multiplied(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, gate, up = operands(*shape, dtype)
    h, of_gate, of_up = gemm.gated_mlp(x, gate, up)
    raw_gate, raw_up = hopper.product(x, gate)[0], hopper.product(x, up)[0]
    for encoded, raw in ((of_gate, raw_gate), (of_up, raw_up)):
        assert torch.equal(bits(encoded.decode()), bits(raw))
    expected = activate("silu", raw_gate) * raw_up
    torch.testing.assert_close(h, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blobs_are_the_references_and_every_backend_decodes_them(dtype: torch.dtype) -> None:
    x, weight, _ = operands(300, 384, 256, dtype)
    x[7], x[9] = 0, x[9] * 4096
    y, encoded = gemm.linear(x, weight, encode=True)
    raw = bits(y).cpu().numpy().view("u2")
    base = encoded.blob.header.plan.dictionary[0]
    data = encoded.blob.host_data()
    assert (data == reference.encode(raw, dtype_of(dtype), base)).all()
    for backend in ("numpy", "cpu"):
        found = ancf.decode(ancf.Blob(data, encoded.shape), backend=backend)
        assert torch.equal(bits(found), bits(y).cpu())


@pytest.mark.gpu
@on_gpu
def test_sums_are_the_same_each_time() -> None:
    x, gate, up = operands(2048, 1024, 2048, torch.bfloat16)
    first = hopper.gated(x, (gate, up), "silu")[0]
    for _ in range(5):
        assert torch.equal(hopper.gated(x, (gate, up), "silu")[0], first)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gradients_from_blobs(name: str) -> None:
    x, gate, up = operands(777, 640, 256, torch.bfloat16)
    first, second = hopper.windows(x, (gate, up))
    h, codes = hopper.gated(x, (gate, up), name, coded=(first, second))
    assert all(fits for _, fits in codes.sizes.wait())
    grad = torch.randn_like(h)
    bases = (first.base, second.base)
    of_gate, of_up, again = hopper.backward(grad, codes.blobs, bases, name)
    raw_gate, raw_up = (hopper.product(x, one)[0].requires_grad_() for one in (gate, up))
    (activate(name, raw_gate) * raw_up).backward(grad)
    assert raw_gate.grad is not None
    assert torch.equal(again, h)
    torch.testing.assert_close(of_up, raw_up.grad, rtol=2**-6, atol=1e-4)
    torch.testing.assert_close(of_gate, raw_gate.grad, rtol=2**-6, atol=1e-4)


@pytest.mark.gpu
@on_gpu
def test_what_the_kernel_does_not_take_is_pytorchs() -> None:
    x, gate, _ = operands(64, 256, 64, torch.bfloat16)
    assert hopper.takes(x, (gate,))
    assert not hopper.takes(x.float(), (gate.float(),))
    assert not hopper.takes(x, (gate[:100],))
    assert not hopper.takes(x[:, :60], (gate[:, :60],))
    assert not hopper.takes(x[:0], (gate,))
    odd = gate[:100].contiguous()
    assert torch.equal(gemm.linear(x, odd), functional.linear(x, odd))


def test_a_device_of_another_kind_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    available, detail = hopper.probe()
    assert not available
    assert "A100 has compute capability 8.0" in detail or "bindings" in detail
