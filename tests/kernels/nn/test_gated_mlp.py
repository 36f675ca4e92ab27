"""nn.GatedMLP: PyTorch's results without the kernel, and with its code gradients from blobs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from storm_kernels import UsageError, backends
from storm_kernels.encoded_bytes import is_encoded
from storm_kernels.gemm import window
from storm_kernels.nn import GatedMLP
from support.gemm_on_cpu import Emulated
from torch import Tensor, nn
from torch.nn import functional

INFO = backends("gemm")["cuda"]
WIDTH, HIDDEN = 64, 256


def layer(dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **options: Any) -> GatedMLP:
    torch.manual_seed(3)
    return GatedMLP(WIDTH, HIDDEN, dtype=dtype, device=device, **options)


def step(mlp: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients of the input and of all parameters."""
    source = x.detach().requires_grad_()
    y = mlp(source)
    gradients = torch.autograd.grad(y.float().square().sum(), [source, *mlp.parameters()])
    return y.detach(), list(gradients)


class Plain(nn.Module):
    """The same operations, as models write them."""

    def __init__(self, mlp: GatedMLP) -> None:
        super().__init__()
        self.gate_proj = copy.deepcopy(mlp.gate_proj)
        self.up_proj = copy.deepcopy(mlp.up_proj)
        self.down_proj = copy.deepcopy(mlp.down_proj)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_kernel_bits_are_pytorchs(dtype: torch.dtype) -> None:
    mlp = layer(dtype)
    x = torch.randn(2, 9, WIDTH).to(dtype)
    (y, gradients), (expected, wanted) = step(mlp, x), step(Plain(mlp), x)
    assert torch.equal(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    difference = mlp.difference()
    assert not difference.fused
    assert difference.largest == difference.relative == 0
    assert "no difference" in str(difference)


def test_with_the_kernels_code_gradients_come_from_blobs(emulated: Emulated) -> None:
    mlp = layer()
    x = torch.randn(2, 9, WIDTH).to(torch.bfloat16)
    (y, gradients), (expected, wanted) = step(mlp, x), step(Plain(mlp), x)
    assert emulated.launched == ["gemm_product", "gemm_records", "gemm_backward"]
    for found, right in zip([y, *gradients], [expected, *wanted], strict=True):
        assert found.shape == right.shape
        assert (found.float() - right.float()).norm() < 0.01 * right.float().norm()
    again, repeated = step(mlp, x)
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))
    emulated.launched.clear()
    difference = mlp.difference()
    assert emulated.launched == ["gemm_product"], "something was encoded without gradients"
    assert difference.fused
    assert 0 <= difference.relative < 0.02
    assert "relative difference" in str(difference)
    mlp.gate_proj.requires_grad_(False)
    mlp(x).sum().backward()
    assert mlp.up_proj.weight.grad is not None
    assert mlp.gate_proj.weight.grad is None


def test_what_is_saved_are_blobs(emulated: Emulated) -> None:
    mlp = layer()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    rows = 64
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(torch.randn(rows, WIDTH).to(torch.bfloat16)).sum().backward()
    parameters = {id(one) for one in mlp.parameters()}
    others = [one for one in saved if id(one) not in parameters]
    blobs = [one for one in others if one.dtype == torch.uint8]
    assert len(blobs) == 2
    assert [is_encoded(one.untyped_storage()) for one in others] == [
        one.dtype == torch.uint8 for one in others
    ]
    assert sum(one.nbytes for one in blobs) < 0.85 * 2 * rows * HIDDEN * 2
    assert [one.shape for one in others if one.dtype != torch.uint8] == [(rows, WIDTH)]
    assert emulated.launched


def test_a_blob_that_did_not_fit_is_made_again(emulated: Emulated) -> None:
    """A hint that is wrong costs a second product, never a wrong gradient."""
    mlp = layer()
    x = torch.randn(40, WIDTH).to(torch.bfloat16)
    y, wanted = step(mlp, x)
    mlp._hint._windows = (window.Window(1, 0.0), window.Window(2, 0.0))
    emulated.launched.clear()
    again, gradients = step(mlp, x)
    assert emulated.launched.count("gemm_product") == 2
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


def test_what_would_be_a_wrong_gradient_is_an_error(emulated: Emulated) -> None:
    x = torch.randn(5, WIDTH).to(torch.bfloat16)
    y = layer()(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    x.requires_grad_()
    (first,) = torch.autograd.grad(layer()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    assert emulated.launched


def test_from_module_reads_the_activation_and_refuses_what_it_does_not_know() -> None:
    plain = Plain(layer())
    assert GatedMLP.from_module(plain).activation == "silu"
    assert not GatedMLP.from_module(plain.eval()).training
    plain.act_fn = nn.GELU(approximate="tanh")  # type: ignore[assignment]
    assert GatedMLP.from_module(plain).activation == "gelu_tanh"
    plain.act_fn = nn.Tanh()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="act_fn Tanh is unknown"):
        GatedMLP.from_module(plain)
    with pytest.raises(UsageError, match="'tanh' is unknown"):
        GatedMLP(8, 8, activation="tanh")
    assert GatedMLP.from_module(plain, activation="relu").activation == "relu"
    with pytest.raises(UsageError, match="a Sequential has no gated projections: gate_proj"):
        GatedMLP.from_module(nn.Sequential(nn.Linear(2, 2)))
    plain.up_proj = nn.Linear(WIDTH, HIDDEN)
    with pytest.raises(UsageError, match=r"up_proj is Linear.*bias=True"):
        GatedMLP.from_module(plain)
    for names in (("gate", "up", "down"), ("w1", "w3", "w2")):
        module = nn.Module()
        for name, (rows, columns) in zip(names, [(256, 64), (256, 64), (64, 256)], strict=True):
            module.add_module(name, nn.Linear(columns, rows, bias=False))
        mlp = GatedMLP.from_module(module)
        assert mlp.down_proj is getattr(module, names[2])
        assert not any(one.is_meta for one in mlp.parameters())


def test_llamas_mlp_becomes_one() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    theirs = modeling.LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=HIDDEN))
    x = torch.randn(3, WIDTH)
    assert torch.equal(GatedMLP.from_module(theirs)(x), theirs(x))


@pytest.mark.gpu
@pytest.mark.skipif(not INFO.available, reason=INFO.detail)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = GatedMLP(512, 1408, dtype=dtype, device="cuda")
    x = torch.randn(2, 700, 512, device="cuda").to(dtype)
    (y, gradients), (expected, wanted) = step(mlp, x), step(Plain(mlp), x)
    for found, right in zip([y, *gradients], [expected, *wanted], strict=True):
        assert (found.float() - right.float()).norm() < 0.02 * right.float().norm()
    again, repeated = step(mlp, x)
    assert torch.equal(again, y)
    assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))
    mlp._hint._windows = (window.Window(1, 0.0), window.Window(2, 0.0))
    _, anew = step(mlp, x)
    assert all(torch.equal(a, b) for a, b in zip(gradients, anew, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not INFO.available, reason=INFO.detail)
def test_on_a_gpu_under_autocast() -> None:
    mlp = GatedMLP(512, 1408, device="cuda")
    x = torch.randn(300, 512, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y = mlp(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert mlp.gate_proj.weight.grad.dtype == torch.float32
    expected = functional.linear(
        functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight
    )
    assert (y.float() - expected).norm() < 0.02 * expected.norm()
