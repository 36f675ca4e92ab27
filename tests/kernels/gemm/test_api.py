"""api.py: what callers get without the kernel, with its code on a CPU, and what is refused."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import UsageError, ancf, gemm
from storm_kernels.gemm import hopper, window
from support.gemm_on_cpu import Emulated
from torch.nn import functional


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return (
        torch.randn(3, 7, 64).to(dtype),
        torch.randn(256, 64).to(dtype),
        torch.randn(256, 64).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_the_kernel_results_are_pytorchs(dtype: torch.dtype) -> None:
    x, gate, up = tensors(dtype)
    bias = gate[:, 0].contiguous()
    assert torch.equal(gemm.linear(x, gate, bias), functional.linear(x, gate, bias))
    y, encoded = gemm.linear(x, gate, encode=True)
    assert torch.equal(y, functional.linear(x, gate))
    assert torch.equal(encoded.decode(), y)
    h, of_gate, of_up = gemm.gated_mlp(x, gate, up)
    raw_gate, raw_up = functional.linear(x, gate), functional.linear(x, up)
    assert torch.equal(h, functional.silu(raw_gate) * raw_up)
    assert torch.equal(of_gate.decode(), raw_gate)
    assert torch.equal(of_up.decode(), raw_up)


def test_the_kernels_blobs_are_handed_over(emulated: Emulated) -> None:
    x, gate, up = tensors()
    h, of_gate, of_up = gemm.gated_mlp(x, gate, up, "gelu")
    raw_gate, raw_up = ((x.float() @ one.float().t()).to(torch.bfloat16) for one in (gate, up))
    assert h.shape == of_gate.shape == of_up.shape == (3, 7, 256)
    assert torch.equal(of_gate.decode(), raw_gate)
    assert torch.equal(of_up.decode(), raw_up)
    assert of_gate.blob.mode == "window"
    assert of_gate.dtype == torch.bfloat16
    assert of_gate.raw_nbytes == h.nbytes
    assert of_gate.ratio == of_gate.raw_nbytes / of_gate.nbytes
    torch.testing.assert_close(h, functional.gelu(raw_gate) * raw_up, rtol=2**-6, atol=1e-5)
    y, encoded = gemm.linear(x, gate, encode=True)
    assert torch.equal(encoded.decode(), y)
    assert emulated.launched == ["gemm_product", "gemm_records"] * 2


def test_a_blob_larger_than_the_tensor_becomes_raw(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the sample misleads, as it does here, every element escapes."""
    monkeypatch.setattr(hopper, "windows", lambda *_: (window.Window(3, 0.0),) * 2)
    x, gate, up = tensors()
    _, of_gate, _ = gemm.gated_mlp(x, gate, up)
    assert of_gate.blob.mode == "raw"
    assert of_gate.nbytes == of_gate.raw_nbytes + 256
    assert torch.equal(of_gate.decode(), (x.float() @ gate.float().t()).to(torch.bfloat16))
    assert emulated.launched


def test_the_gradient_of_a_weight() -> None:
    x, _, _ = tensors()
    encoded = gemm.Encoded(ancf.encode(x))
    grad = torch.randn(3, 7, 32).to(torch.bfloat16)
    expected = grad.reshape(-1, 32).t() @ x.reshape(-1, 64)
    assert torch.equal(gemm.grad_weight(grad, encoded), expected)
    with pytest.raises(UsageError, match="all but the last extents"):
        gemm.grad_weight(grad[:2], encoded)
    assert torch.equal(encoded.decode(torch.empty_like(x)), x)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, gate, up = tensors()
    with pytest.raises(UsageError, match=r"x of shape \(3, 7, 64\) and a weight of shape"):
        gemm.linear(x, gate[:, :32])
    with pytest.raises(UsageError, match=r"x is torch.float32 and a weight torch.bfloat16"):
        gemm.linear(x.float(), gate)
    with torch.autocast("cpu"):
        assert gemm.linear(x.float(), gate).dtype == torch.bfloat16
    with pytest.raises(UsageError, match="x is a Tensor; give what `encode=True` has returned"):
        gemm.grad_weight(x, x)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bias of shape"):
        gemm.linear(x, gate, up[0])
    with pytest.raises(UsageError, match=r"x is torch.bfloat16 and a bias torch.float32"):
        gemm.linear(x, gate, gate[:, 0].float())
    with pytest.raises(UsageError, match="give one shape"):
        gemm.gated_mlp(x, gate, up[:128])
    with pytest.raises(UsageError, match="'tanh' is unknown; choose one of 'silu'"):
        gemm.gated_mlp(x, gate, up, "tanh")
