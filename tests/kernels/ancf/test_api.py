"""api.py: tensors of any kind through `encode` and `decode`, compared bit by bit."""

from __future__ import annotations

import pytest
import torch
from storm_kernels import ancf, backends
from storm_kernels.ancf import DType

DTYPES = [getattr(torch, dtype.torch_name) for dtype in DType if dtype is not DType.BYTES]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    noise = torch.randint(0, 256, (size,), dtype=torch.uint8)
    if dtype is torch.bool:
        noise &= 1
    return noise.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(name, dtype):
    tensor = random_tensor(dtype, 30, 41)
    blob = ancf.encode(tensor, backend=name)
    same = ancf.decode(blob, backend=name)
    assert (same.dtype, same.shape) == (dtype, tensor.shape)
    assert torch.equal(bits(same), bits(tensor))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:-3:3],
        lambda t: t[3],
        lambda t: t[0, 0],
        lambda t: t[5:5],
        lambda t: t.expand(3, *t.shape),
        lambda t: torch.view_as_complex(t[:, :2].contiguous()).conj(),
        lambda t: torch.view_as_complex(t[:, :2].contiguous()).conj().imag,
    ],
)
def test_views(name, view):
    tensor = view(torch.randn(64, 96))
    same = ancf.decode(ancf.encode(tensor, backend=name), backend=name)
    assert same.shape == tensor.shape
    assert torch.equal(bits(same), bits(tensor))


def test_backends_decode_each_others_blobs(name):
    tensor = torch.randn(50_000).bfloat16()
    for other in ("numpy", "cpu"):
        if backends()[other].available:
            blob = ancf.encode(tensor, backend=other)
            assert torch.equal(bits(ancf.decode(blob, backend=name)), bits(tensor))


def test_gradients_do_not_matter():
    tensor = torch.randn(10, requires_grad=True)
    assert not ancf.decode(ancf.encode(tensor)).requires_grad
    out = torch.empty(10, requires_grad=True)
    assert torch.equal(ancf.decode(ancf.encode(tensor), out=out), tensor)


@pytest.mark.parametrize("make", [torch.empty, lambda a, b: torch.empty(b, a).t()])
def test_given_output(name, make):
    tensor = torch.randn(33, 20)
    out = make(33, 20)
    assert ancf.decode(ancf.encode(tensor), out=out, backend=name) is out
    assert torch.equal(out, tensor)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(20, 33), "shape"),
        (torch.empty(33, 20, dtype=torch.float64), "float64"),
        (torch.empty(33, 20, device="meta"), "meta"),
    ],
)
def test_outputs_that_do_not_fit(out, message):
    blob = ancf.encode(torch.randn(33, 20))
    with pytest.raises(ancf.UsageError, match=message):
        ancf.decode(blob, out=out, device="cpu")


def test_damage_reaches_the_caller(name):
    blob = ancf.encode(torch.randn(10_000))
    damaged = blob.host_data().copy()
    damaged[blob.nbytes // 2] ^= 1
    with pytest.raises(ancf.CorruptBlob):
        ancf.decode(ancf.Blob(damaged, blob.shape), backend=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "zip"}, "'zip'"),
        ({"speed": "slow"}, "'slow'"),
        ({"policy": "bold"}, "'bold'"),
        ({"backend": "tpu"}, "'tpu'"),
        ({"backend": "cuda"}, "cuda"),
    ],
)
def test_unknown_options(options, message):
    with pytest.raises((ancf.UsageError, ancf.BackendUnavailable), match=message):
        ancf.encode(torch.randn(10), **options)


def test_unknown_dtypes():
    with pytest.raises(ancf.UsageError, match="quint8"):
        ancf.encode(torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8))


def test_host_memory_has_no_cuda_backend():
    with pytest.raises((ancf.UsageError, ancf.BackendUnavailable)):
        ancf.host_backend("cuda")
