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


def test_every_dtype(name):
    for dtype in DTYPES:
        tensor = random_tensor(dtype, 30, 41)
        blob = ancf.encode(tensor, backend=name)
        same = ancf.decode(blob, backend=name)
        assert (same.dtype, same.shape) == (dtype, tensor.shape)
        assert torch.equal(bits(same), bits(tensor))


def test_views(name):
    for view in (
        lambda t: t.t(),
        lambda t: t[::2, 1:-3:3],
        lambda t: t[3],
        lambda t: t[0, 0],
        lambda t: t[5:5],
        lambda t: t.expand(3, *t.shape),
        lambda t: torch.view_as_complex(t[:, :2].contiguous()).conj(),
        lambda t: torch.view_as_complex(t[:, :2].contiguous()).conj().imag,
    ):
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


def test_given_outputs(name):
    tensor = torch.randn(33, 20, requires_grad=True)
    assert not ancf.decode(ancf.encode(tensor), backend=name).requires_grad
    with torch.inference_mode():
        inference = torch.empty(33, 20)
    for out in (
        torch.empty(33, 20),
        torch.empty(20, 33).t(),
        torch.empty(33, 20, requires_grad=True),
        inference,
    ):
        assert ancf.decode(ancf.encode(tensor), out=out, backend=name) is out
        assert torch.equal(out, tensor)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["contiguous", "transposed"])
def test_a_backward_pass_notices_what_was_written(shape):
    saved = torch.randn(*shape, requires_grad=True).exp()
    out = saved.detach().t() if len(shape) == 2 else saved
    ancf.decode(ancf.encode(torch.zeros(out.shape)), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_outputs_that_do_not_fit(name):
    blob = ancf.encode(torch.randn(33, 20))
    for given, message in (
        ({"out": torch.empty(20, 33)}, "shape"),
        ({"out": "cpu"}, "out is a str; give a tensor"),
        ({"out": torch.empty(33, 20, dtype=torch.float64)}, "float64"),
        ({"out": torch.empty(33, 20, device="meta"), "device": "cpu"}, "meta"),
        ({"out": torch.empty(33, 20, device="meta")}, "'meta' hold no data"),
        ({"device": "meta"}, "'meta' hold no data"),
        ({"threads": -1}, "threads=-1"),
    ):
        with pytest.raises(ancf.UsageError, match=message):
            ancf.decode(blob, backend=name, **given)
    with pytest.raises(ancf.UsageError, match="a bytes is no Blob"):
        ancf.decode(blob.to_bytes())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros(4), "a ndarray is no torch tensor"),
        (torch.eye(4).to_sparse(), "strided tensors, not torch.sparse_coo"),
        (torch.empty(4, device="meta"), "'meta' hold no data"),
        (NESTED, "strided tensors, not nested ones"),
    ],
)
def test_what_cannot_be_encoded(source, message):
    with pytest.raises(ancf.UsageError, match=message):
        ancf.encode(source)


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(4)


def test_what_has_no_memory_of_its_own(name):
    """Its address is 0, where to read or write ends the process."""
    blob = ancf.encode(torch.ones(4), backend=name)
    refused = pytest.raises(ancf.UsageError, match=r"has no memory of its own; give the tensor")
    for tensor in (
        fake_tensor(),
        TwoTensor(torch.zeros(4), torch.zeros(4)),
        torch._efficientzerotensor((4,)),
    ):
        with refused:
            ancf.encode(tensor, backend=name)
        with refused:
            ancf.decode(blob, out=tensor, backend=name)
    with FakeTensorMode(), pytest.raises(ancf.UsageError, match="has no memory of its own"):
        ancf.decode(blob, backend=name)
    with pytest.raises(ancf.UsageError, match="has no memory of its own"):
        torch.func.vmap(lambda row: ancf.encode(row, backend=name))(torch.ones(2, 4))


def test_damage_reaches_the_caller(name):
    blob = ancf.encode(torch.randn(10_000))
    damaged = blob.host_data().copy()
    damaged[blob.nbytes // 2] ^= 1
    with pytest.raises(ancf.CorruptBlob):
        ancf.decode(ancf.Blob(damaged, blob.shape), backend=name)


def test_unknown_options():
    for options, message in (
        ({"mode": "ZIP"}, "mode 'ZIP' is unknown; choose one of auto, raw, window"),
        ({"speed": "slow"}, "speed 'slow' is unknown; choose one of fast, dense"),
        ({"policy": "bold"}, "policy 'bold' is unknown; choose one of conservative"),
        ({"backend": "tpu"}, "'tpu'"),
        ({"backend": "cuda"}, "cuda"),
        ({"threads": 0}, "threads=0"),
    ):
        with pytest.raises((ancf.UsageError, ancf.BackendUnavailable), match=message):
            ancf.encode(torch.randn(10), **options)
    with pytest.raises(ancf.UsageError, match="quint8"):
        ancf.encode(torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8))
    with pytest.raises((ancf.UsageError, ancf.BackendUnavailable)):
        ancf.host_backend("cuda")
