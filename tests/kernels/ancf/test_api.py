"""api.py: tensors of any kind through `encode` and `decode`, compared bit by bit."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from storm_kernels import ancf, backends
from storm_kernels.ancf import DType
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

DTYPES = [getattr(torch, dtype.torch_name) for dtype in DType if dtype is not DType.BYTES]

with warnings.catch_warnings(action="ignore"):  # PyTorch's, that its interface may change
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


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


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["contiguous", "transposed"])
def test_a_backward_pass_notices_what_was_written(shape):
    saved = torch.randn(*shape, requires_grad=True).exp()
    out = saved.detach().t() if len(shape) == 2 else saved
    ancf.decode(ancf.encode(torch.zeros(out.shape)), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_inference_tensors_are_written_too():
    tensor = torch.randn(10)
    with torch.inference_mode():
        out = torch.empty(10)
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
        ("cpu", "out is a str; give a tensor"),
        (torch.empty(33, 20, dtype=torch.float64), "float64"),
        (torch.empty(33, 20, device="meta"), "meta"),
    ],
)
def test_outputs_that_do_not_fit(out, message):
    blob = ancf.encode(torch.randn(33, 20))
    with pytest.raises(ancf.UsageError, match=message):
        ancf.decode(blob, out=out, device="cpu")


@pytest.mark.parametrize("given", [{"device": "meta"}, {"out": torch.empty(33, device="meta")}])
def test_outputs_without_memory(name, given):
    with pytest.raises(ancf.UsageError, match="'meta' hold no data"):
        ancf.decode(ancf.encode(torch.randn(33)), backend=name, **given)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros(4), "a ndarray is no torch tensor"),
        (torch.eye(4).to_sparse(), "strided tensors, not torch.sparse_coo"),
        (torch.empty(4, device="meta"), "'meta' hold no data"),
        (NESTED, "strided tensors, not nested ones"),
    ],
)
@pytest.mark.parametrize("ask", [ancf.encode, ancf.analyze])
def test_what_cannot_be_encoded(ask, source, message):
    with pytest.raises(ancf.UsageError, match=message):
        ask(source)


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4)


WITHOUT_MEMORY = {
    "fake": fake_tensor,
    "wrapper": lambda: TwoTensor(torch.zeros(4), torch.zeros(4)),
    "zero": lambda: torch._efficientzerotensor((4,)),
}


@pytest.mark.parametrize("make", WITHOUT_MEMORY.values(), ids=WITHOUT_MEMORY.keys())
def test_what_has_no_memory_of_its_own(name, make):
    """Its address is 0, where to read or write ends the process."""
    blob = ancf.encode(torch.ones(4), backend=name)
    with pytest.raises(ancf.UsageError, match=r"has no memory of its own; give the tensor"):
        ancf.encode(make(), backend=name)
    with pytest.raises(ancf.UsageError, match=r"has no memory of its own; give the tensor"):
        ancf.decode(blob, out=make(), backend=name)


def test_decoding_where_pytorch_makes_fake_tensors(name):
    blob = ancf.encode(torch.ones(4), backend=name)
    with FakeTensorMode(), pytest.raises(ancf.UsageError, match="has no memory of its own"):
        ancf.decode(blob, backend=name)


def test_what_transforms_of_functions_wrap(name):
    with pytest.raises(ancf.UsageError, match="has no memory of its own"):
        torch.func.vmap(lambda row: ancf.encode(row, backend=name))(torch.ones(2, 4))


def test_bytes_are_no_blob():
    with pytest.raises(ancf.UsageError, match="a bytes is no Blob"):
        ancf.decode(ancf.encode(torch.randn(4)).to_bytes())


def test_no_threads_are_too_few(name):
    tensor = torch.randn(4)
    with pytest.raises(ancf.UsageError, match="threads=0"):
        ancf.encode(tensor, backend=name, threads=0)
    with pytest.raises(ancf.UsageError, match="threads=-1"):
        ancf.decode(ancf.encode(tensor), backend=name, threads=-1)


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
