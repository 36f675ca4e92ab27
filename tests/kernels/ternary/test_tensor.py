"""TernaryTensor: rounding with scales, bytes and back, and bytes that are damaged."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from storm_kernels import CorruptBlob, UsageError
from storm_kernels.ternary import TernaryTensor, blob

from .conftest import ternary


def same(one: TernaryTensor, other: TernaryTensor) -> None:
    assert one.shape == other.shape
    assert one.group == other.group
    assert (np.asarray(one.bit0) == np.asarray(other.bit0)).all()
    assert (np.asarray(one.bit1) == np.asarray(other.bit1)).all()
    assert (one.scale is None) == (other.scale is None)
    if one.scale is not None:
        assert np.asarray(one.scale).tobytes() == np.asarray(other.scale).tobytes()


CUTS = list(product([None, 32, 64], [(3, 70), (5, 64), (2, 3, 33), (40,)], ["absmean", 0.3]))


@pytest.mark.parametrize(("group", "shape", "threshold"), CUTS[::3])
def test_no_other_scale_of_these_signs_is_nearer(shape, group, threshold):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tensor = TernaryTensor.from_float(values, threshold, group=group)
    from_torch = TernaryTensor.from_float(torch.from_numpy(values), threshold, group=group)
    assert torch.is_tensor(from_torch.bit0)
    assert (from_torch.decode().numpy() == tensor.decode()).all()
    assert np.allclose(from_torch.scale.numpy(), tensor.scale, rtol=1e-6)
    limit = 0.5 * np.abs(values).mean() if threshold == "absmean" else threshold
    assert (tensor.decode() == np.sign(values) * (np.abs(values) > limit)).all()
    error = np.square(values - tensor.to_float()).sum()
    for factor in (0.99, 1.01):
        moved = TernaryTensor(*tensor.planes, shape, factor * tensor.scale, group)
        assert np.square(values - moved.to_float()).sum() > error


def test_a_product_with_scales_is_that_of_the_floats():
    values = np.random.default_rng(1).standard_normal((7, 200)).astype(np.float32)
    x = np.random.default_rng(2).standard_normal((3, 200)).astype(np.float32)
    for group in (None, 64):
        tensor = TernaryTensor.from_float(values, group=group)
        expected = x.astype(np.float64) @ tensor.to_float().astype(np.float64).T
        assert np.allclose(tensor.matmul(x), expected, rtol=1e-5, atol=1e-4)
        assert (tensor.matvec(x[0]) == tensor.matmul(x)[0]).all()


def test_a_group_may_be_larger_than_any_row():
    values = np.random.default_rng(0).standard_normal((7, 200)).astype(np.float32)
    expected = TernaryTensor.from_float(values).to_float()
    tensor = TernaryTensor.from_float(values, group=1 << 50)
    assert (TernaryTensor.from_bytes(tensor.to_bytes()).to_float() == expected).all()


@pytest.mark.parametrize("columns", [69, 71])
def test_a_product_with_another_number_of_columns_is_refused(columns):
    """The rows of its planes have room for 128, so that the planes alone would let them pass."""
    tensor = TernaryTensor.encode(ternary(3, 70))
    for x in (np.ones((2, columns), np.float32), TernaryTensor.encode(ternary(2, columns))):
        with pytest.raises(UsageError, match=rf"\(2, {columns}\); give \(..., 70\)"):
            tensor.matmul(x)
    with pytest.raises(UsageError, match=rf"\({columns},\); give \(..., 70\)"):
        tensor.to("cpu").matvec(torch.ones(columns))
    assert tensor.matmul(TernaryTensor.encode(ternary(2, 70)).planes).shape == (2, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_floats_that_no_scale_brings_back(bad):
    for threshold in ("absmean", 0.5):
        with pytest.raises(UsageError):
            TernaryTensor.from_float(np.array([[1.0, bad]], np.float32), threshold)
    with pytest.raises(UsageError, match="'absmax'"):
        TernaryTensor.from_float(np.ones((1, 2)), "absmax")


def test_empty_and_constant_tensors():
    for shape in ((0, 5), (5, 0)):
        tensor = TernaryTensor.from_float(np.zeros(shape, np.float32))
        assert tensor.to_float().shape == shape
        same(TernaryTensor.from_bytes(tensor.to_bytes(packed=True)), tensor)
    assert not TernaryTensor.from_float(np.zeros((3, 40), np.float32)).to_float().any()


@pytest.mark.parametrize("shape", [(1,), (5, 64), (3, 70), (2, 3, 128), (7, 333), (1000,)])
def test_bytes_and_back(shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for tensor in (
        TernaryTensor.encode(ternary(*shape)),
        TernaryTensor.from_float(values),
        TernaryTensor.from_float(values, group=32),
        TernaryTensor.from_float(torch.from_numpy(values)),
    ):
        for packed in (False, True):
            same(TernaryTensor.from_bytes(tensor.to_bytes(packed=packed)), tensor)
        same(tensor.to("cpu").numpy(), tensor.numpy())


def test_a_value_takes_two_bits_and_in_packed_bytes_1_6():
    tensor = TernaryTensor.encode(ternary(1000, 1024))
    assert tensor.nbytes == 2 * 1000 * 1024 // 8
    assert 8 * len(tensor.to_bytes(packed=True)) / (1000 * 1024) < 1.601


@given(st.data())
def test_damaged_bytes_are_refused(data):
    """A flipped bit, a cut, more at the end: always CorruptBlob, never another tensor."""
    tensor = TernaryTensor.from_float(
        np.random.default_rng(0).standard_normal((5, 70)).astype(np.float32), group=32
    )
    whole = tensor.to_bytes(packed=data.draw(st.booleans()))
    kind = data.draw(st.sampled_from(["flip", "cut", "more"]))
    if kind == "flip":
        place = data.draw(st.integers(0, 8 * len(whole) - 1))
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
    elif kind == "cut":
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        broken = whole + data.draw(st.binary(min_size=1, max_size=20))
    with pytest.raises(CorruptBlob):
        TernaryTensor.from_bytes(broken)


@given(st.binary(max_size=200), st.booleans())
def test_bytes_with_a_right_checksum_are_checked_too(noise, begins_well):
    """Who can write a checksum can write any header: it must lead nowhere either."""
    import struct
    import zlib

    body = (b"STRN\x01" if begins_well else b"") + noise
    data = body + struct.pack("<I", zlib.crc32(body))
    try:
        tensor = TernaryTensor.from_bytes(data)
    except CorruptBlob:
        return
    same(TernaryTensor.from_bytes(tensor.to_bytes()), tensor)


@given(
    form=st.integers(0, 2), flags=st.integers(0, 2), group=st.sampled_from([0, 32, 33, 1 << 60]),
    shape=st.lists(st.sampled_from([0, 1, 5, 64, 70, 1 << 31, (1 << 64) - 1]), max_size=4),
    payload=st.binary(max_size=300),
)  # fmt: skip
def test_headers_that_lie_about_sizes(form, flags, group, shape, payload):
    import struct
    import zlib

    head = struct.pack("<4sBBBBQ", b"STRN", 1, form, len(shape), flags, group)
    body = head + struct.pack(f"<{len(shape)}Q", *shape) + payload
    try:
        tensor = TernaryTensor.from_bytes(body + struct.pack("<I", zlib.crc32(body)))
    except CorruptBlob:
        return
    tensor.check()


def test_planes_in_bytes_must_stand_for_values():
    tensor = TernaryTensor.encode(ternary(2, 70))
    parts = blob.split(tensor.to_bytes())
    for place, value, message in ((16 * 2 + 3, 0xFF, "no value"), (15, 0x80, "behind column 70")):
        payload = bytearray(parts.payload)
        if place == 35:
            payload[3] = 0
        payload[place] = value
        with pytest.raises(CorruptBlob, match=message):
            TernaryTensor.from_bytes(blob.join(blob.Parts(0, parts.shape, 0, None, bytes(payload))))


def test_parts_that_do_not_fit():
    bit0, bit1 = TernaryTensor.encode(ternary(3, 70)).planes
    for shape, scale, group, message in (
        ((3, 200), None, None, "bit0 has shape"),
        ((), None, None, "at least one dimension"),
        ((3, 70), np.zeros((3, 2), np.float32), None, "scale has shape"),
        ((3, 70), np.zeros((3, 2), np.float32), 32, "scale has shape"),
        ((3, 70), None, 32, "there is no scale"),
    ):
        with pytest.raises(UsageError, match=message):
            TernaryTensor(bit0, bit1, shape, scale, group)
    with pytest.raises(UsageError, match="no matrix"):
        TernaryTensor.encode(ternary(70)).matvec(np.zeros(70, np.int8))
