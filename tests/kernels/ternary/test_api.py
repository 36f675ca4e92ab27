"""The functions that callers use: arrays and tensors, shapes, dtypes, errors that name things."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from storm_kernels import CorruptBlob, UsageError
from storm_kernels.ternary import (
    TernaryTensor,
    decode,
    dot,
    encode,
    matmul,
    matvec,
    pack,
    unpack,
)

from .conftest import ternary


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int64, np.float16, np.float32, np.float64, torch.int8, torch.bfloat16,
              torch.float16, torch.float64, torch.int32]
)  # fmt: skip
def test_every_shape_and_dtype_comes_back(dtype):
    for shape in ((5,), (64,), (3, 70), (2, 3, 65), (0,), (0, 5), (4, 0)):
        values = ternary(*shape)
        given = torch.from_numpy(values).to(dtype) if isinstance(dtype, torch.dtype) else None
        bit0, bit1 = encode(values.astype(dtype) if given is None else given)
        assert tuple(bit0.shape) == tuple(bit1.shape) == (*shape[:-1], -(-shape[-1] // 64) * 8)
        back = decode(bit0, bit1, shape, dtype)
        assert back.dtype == dtype
        assert isinstance(back, torch.Tensor) == (given is not None)
        assert (np.asarray(back if given is None else back.float()) == values).all()
        assert (np.asarray(decode(bit0, bit1, shape[-1])) == values).all()
        whole = np.asarray(decode(bit0, bit1))
        assert (whole[..., : shape[-1]] == values).all()
        assert not whole[..., shape[-1] :].any()


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_the_first_other_value_is_named_by_its_place(backend):
    for dtype in ("int8", "int32", "float32", "float64"):
        values = ternary(2, 3, 70).astype(dtype)
        values[1, 2, 5] = 7
        values[1, 2, 6] = -9
        for given in (values, torch.from_numpy(values)):
            with pytest.raises(UsageError, match=r"values\[1, 2, 5\] is 7"):
                encode(given, backend=backend)
        encode(values, 0.5, backend=backend)


def test_integers_do_not_wrap_into_ternary_values():
    with pytest.raises(UsageError, match=r"values\[1\] is 257"):
        encode(np.array([0, 257]))
    with pytest.raises(UsageError, match=r"values\[0\] is 255"):
        encode(np.array([255, 1], np.uint8))
    assert decode(*encode(np.array([True, False])), 2).tolist() == [1, 0]
    assert decode(*encode(np.array([200, 3], np.uint8), 5), 2).tolist() == [1, 0]


def test_a_threshold_takes_the_sign_of_what_is_beyond_it():
    values = [0.5, -0.5, 0.51, -0.51, 0.0, 9.0]
    for dtype in (np.float32, np.float64):
        planes = encode(np.array(values, dtype), 0.5)
        assert decode(*planes, 6).tolist() == [0, 0, 1, -1, 0, 1]
    planes = encode(torch.tensor(values, dtype=torch.float64), 0.5)
    assert decode(*planes, 6).tolist() == [0, 0, 1, -1, 0, 1]
    for one in (np.array([0.1], np.float16), torch.tensor([0.1], dtype=torch.float16)):
        assert decode(*encode(one, 0.09997), 1).tolist() == [1]  # in float16 both are equal
    eighths = torch.tensor([0.125, -0.5]).to(torch.float8_e4m3fn)
    assert decode(*encode(eighths, 0.25), 2).tolist() == [0, -1]
    with pytest.raises(UsageError, match=r"values\[1\] is nan.*no sign"):
        encode(np.array([1, np.nan]), 0.5)
    for threshold in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="threshold is"):
            encode(np.zeros(3, np.float32), threshold)


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_products_of_arrays_and_tensors(backend):
    w, x = ternary(5, 70), np.random.default_rng(0).integers(-128, 128, (2, 3, 70)).astype(np.int8)
    planes = encode(w)
    tensors = [torch.from_numpy(plane) for plane in planes]
    expected = x.astype(np.int32) @ w.T.astype(np.int32)
    found = matmul(*planes, x, backend=backend)
    assert found.dtype == np.int32
    assert (found == expected).all()
    found = matmul(*tensors, torch.from_numpy(x), backend=backend)
    assert found.dtype == torch.int32
    assert (found.numpy() == expected).all()
    assert (matvec(*planes, x[0, 0], backend=backend) == expected[0, 0]).all()
    floats = torch.randn(3, 70)
    for given in (floats, floats.bfloat16()):
        other = matmul(*planes, given.float().numpy(), backend="numpy")
        assert matmul(*tensors, given, backend=backend).numpy().tobytes() == other.tobytes()


def test_scales_of_every_form():
    w, x = ternary(4, 96), ternary(3, 96, seed=1)
    planes = encode(w)
    plain = (x.astype(np.float32) @ w.T).astype(np.float32)
    rows = np.array([1, 2, 4, 0.5], np.float32)
    assert (matmul(*planes, x, scale=2) == 2 * plain).all()
    assert (matmul(*planes, x, scale=rows) == plain * rows).all()
    assert (matmul(*planes, x, scale=rows.reshape(4, 1)) == plain * rows).all()
    groups = np.arange(12, dtype=np.float32).reshape(4, 3)
    expected = sum(
        (x[:, at : at + 32].astype(np.float32) @ w[:, at : at + 32].T) * groups[:, at // 32]
        for at in (0, 32, 64)
    )
    assert (matmul(*planes, x, scale=groups, group=32) == expected).all()
    nothing = [plane[:, :0] for plane in planes]
    assert not matmul(*nothing, x[:, :0], scale=np.ones((4, 1)), group=32).any()


def test_arguments_that_do_not_fit():
    bit0, bit1 = encode(ternary(5, 70))
    for change, message in (
        ({"x": np.zeros(70)}, "x is float64"),
        ({"x": np.zeros(200, np.int8)}, "do not hold 200 columns"),
        ({"x": np.zeros(60, np.int8)}, "do not hold 60 columns"),
        ({"x": np.int8(3)}, "0 dimensions"),
        ({"scale": np.zeros(3)}, "scale has shape"),
        ({"group": 32}, "there is no scale"),
        ({"scale": np.zeros((5, 2)), "group": 48}, "multiple of 32"),
        ({"scale": np.zeros((5, 2)), "group": 32}, "scale has shape"),
        ({"threads": 0}, "threads is 0"),
        ({"w0": np.zeros((5, 16))}, "w0 is float64"),
        ({"w1": np.zeros((4, 16), np.uint8)}, "two planes have one shape"),
        ({"x": (np.zeros((1, 8), np.uint8),) * 2}, "rows of w have 16 bytes"),
        ({"x": (np.zeros((1, 8), np.uint8),)}, "a tuple of 1"),
        ({"backend": "abacus"}, "'abacus' is unknown"),
    ):
        given = {"w0": bit0, "w1": bit1, "x": np.zeros(70, np.int8)} | change
        with pytest.raises(UsageError, match=message):
            matmul(given.pop("w0"), given.pop("w1"), given.pop("x"), **given)
    with pytest.raises(UsageError, match="use matmul"):
        matvec(bit0, bit1, np.zeros((2, 70), np.int8))
    assert matvec(bit0, bit1, TernaryTensor.encode(ternary(1, 70)[0])).shape == (5,)


def test_dot_of_arrays_and_tensors():
    a, b = ternary(1000), ternary(1000, seed=1)
    planes = (*encode(a), *encode(b))
    expected = int(a.astype(int) @ b.astype(int))
    assert dot(*planes) == dot(*planes, backend="numpy") == expected
    found = dot(*(torch.from_numpy(plane) for plane in planes))
    assert found.dtype == torch.int64
    assert found.item() == expected
    with pytest.raises(UsageError, match="a has planes of shape"):
        dot(*planes[:2], *encode(ternary(10)))


def test_planes_of_no_values_are_refused_where_they_are_read():
    bit0, bit1 = encode(ternary(2, 64))
    bit0[1, 2] &= 0xEF
    bit1[1, 2] |= 0x10
    for backend in ("numpy", "auto"):
        with pytest.raises(CorruptBlob, match=r"at \[1, 20\]"):
            decode(bit0, bit1, (2, 64), backend=backend)
        with pytest.raises(CorruptBlob):
            matmul(bit0, bit1, np.zeros(64, np.int8), backend=backend)


def test_packing_checks_sizes():
    bit0, bit1 = encode(ternary(1000))
    packed = pack(bit0, bit1, 1000)
    assert packed.size == 200
    assert (decode(*unpack(packed, 1000), 1000) == ternary(1000)).all()
    with pytest.raises(UsageError, match="1000 values are 200 bytes, not 199"):
        unpack(packed[:-1], 1000)
    with pytest.raises(UsageError, match="2000 values do not lie"):
        pack(bit0, bit1, 2000)


def test_arrays_that_are_not_contiguous():
    w, x = ternary(6, 130), ternary(130, 4, seed=2)
    expected = (w.astype(np.int32) @ x.astype(np.int32)).T
    planes = encode(np.asfortranarray(w))
    assert (matmul(*planes, x.T) == expected).all()
    assert (matmul(*(np.asfortranarray(plane) for plane in planes), x.T) == expected).all()


def test_numpy_alone_is_enough():
    """Neither importing nor computing loads torch or anything of CUDA."""
    code = (
        "import sys, numpy as np\n"
        "from storm_kernels import ternary\n"
        "planes = ternary.encode(np.array([[1, 0, -1]], np.int8))\n"
        "ternary.matvec(*planes, np.array([3, 4, 5], np.int8))\n"
        "sys.exit(', '.join({'torch', 'cupy', 'cuda', 'triton'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
