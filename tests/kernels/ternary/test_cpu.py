"""The C library: every variant has the oracle's results, bit for bit, and touches only its own.

Shapes lie around every boundary of a variant: words of 32 and 64 columns, vectors of 128, 256 and
512, blocks of packed values.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from storm_kernels import BackendUnavailable, CorruptBlob, UsageError
from storm_kernels.ternary import cpu, reference
from storm_kernels.ternary.planes import Kind, Product

from .conftest import Guarded, planes, ternary

available, detail = cpu.probe()
needs_library = pytest.mark.skipif(not available, reason=f"C library: {detail}")
VARIANTS = cpu.available_variants() if available else ()
COLUMNS = [
    *range(1, 9), 31, 32, 33, *range(60, 67), 127, 128, 129, 255, 256, 257, 320, 511, 512, 513, 640,
    1025, 2100,
]  # fmt: skip


@pytest.fixture(params=VARIANTS, ids=lambda one: one.name.lower())
def variant(request) -> cpu.CpuTernary:
    return cpu.CpuTernary(request.param)


def products(w: np.ndarray, batch: int, guard: object = lambda array: array) -> list[Product]:
    """Return every kind of x with every kind of scale."""
    rows, columns = w.shape
    rng = np.random.default_rng([rows, columns, batch])
    floats = rng.standard_normal((batch, columns)).astype(np.float32)
    whole = rng.integers(-128, 128, (batch, columns)).astype(np.int8)
    whole[0] = -128  # the largest sums
    bits = planes(ternary(batch, columns, seed=1))
    operands = [
        (whole, Kind.INT8, None),
        (floats, Kind.FLOAT32, None),
        ((floats.view(np.uint32) >> 16).astype(np.uint16), Kind.BFLOAT16, None),
        (bits[0], Kind.PLANES, bits[1]),
    ]
    scales = [(None, 0), (rng.standard_normal((rows, 1)).astype(np.float32), 0)]
    for group in (32, 96):
        if group < columns:
            scale = rng.standard_normal((rows, -(-columns // group))).astype(np.float32)
            scales.append((scale, group))
    bit0, bit1 = (guard(plane) for plane in planes(w))
    return [
        Product(
            bit0, bit1, columns, guard(x), kind,
            None if x1 is None else guard(x1), None if scale is None else guard(scale), group,
        )
        for x, kind, x1 in operands
        for scale, group in scales
    ]  # fmt: skip


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_planes_and_values(variant):
    for columns in COLUMNS:
        w = ternary(3, columns)
        both = planes(w)
        for values, kind in (
            (w, Kind.INT8),
            (w.astype(np.float32), Kind.FLOAT32),
            ((w.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), Kind.BFLOAT16),
        ):
            for found, expected in zip(variant.encode(values, kind, None), both, strict=True):
                check(found, expected)
        for kind in (Kind.INT8, Kind.FLOAT32):
            expected = reference.decode(*both, columns, kind)
            check(variant.decode(*both, columns, kind), expected)


def test_thresholds(variant):
    for threshold in (0.0, 0.5, 1.25):
        values = np.random.default_rng(3).standard_normal((5, 203)).astype(np.float32)
        values[0, :6] = [threshold, -threshold, 0.0, -0.0, np.inf, -np.inf]
        for found, expected in zip(
            variant.encode(values, Kind.FLOAT32, threshold),
            reference.encode(values, Kind.FLOAT32, threshold),
            strict=True,
        ):
            check(found, expected)


def test_the_first_value_that_is_refused_is_found(variant):
    bad = [(Kind.INT8, one) for one in (2, -2, 127, -128)]
    bad += [(Kind.FLOAT32, one) for one in (0.5, -1.5, np.nan, np.inf, 1e-40)]
    for place in (0, 1, 63, 64, 200, 299):
        for kind, one in bad:
            values = ternary(1, 300).astype(np.int8 if kind is Kind.INT8 else np.float32)
            values[0, place:] = one
            with pytest.raises(UsageError, match=rf"\[0, {place}\]"):
                variant.encode(values, kind, None)
        values = np.zeros((1, 300), np.float32)
        values[0, place] = np.nan
        with pytest.raises(UsageError, match=rf"\[0, {place}\] is nan"):
            variant.encode(values, Kind.FLOAT32, 0.5)


@needs_library
def test_products():
    """Of every variant, whatever the number of threads."""
    for rows, batch in ((1, 1), (3, 2), (5, 7)):
        for columns in COLUMNS if rows == 5 else COLUMNS[::3]:
            for product in products(ternary(rows, columns), batch):
                expected = reference.multiply(product)
                for one in VARIANTS:
                    check(cpu.CpuTernary(one).multiply(product), expected)
    for product in products(ternary(37, 2048), 128):
        if product.kind in {Kind.INT8, Kind.PLANES}:
            expected = reference.multiply(product)
            for one in VARIANTS:
                for threads in (2, 3, 64):
                    product.threads = threads
                    check(cpu.CpuTernary(one).multiply(product), expected)


def test_nothing_is_read_or_written_beside_the_arrays(variant):
    """Misaligned planes, x and scales between guards; what is read beyond would change results."""
    for columns, offset in ((1, 1), (7, 2), (65, 8), (130, 33), (500, 1), (513, 2)):
        for batch in (1, 5):
            kept: list[Guarded] = []

            def guard(array: np.ndarray, kept=kept, offset=offset) -> np.ndarray:
                # The guards are no multiple of an element, which floats must be aligned to.
                kept.append(Guarded(array, offset if array.itemsize == 1 else 4 * offset))
                return kept[-1].array

            w = ternary(4, columns)
            expected = [reference.multiply(one) for one in products(w, batch)]
            for product, one in zip(products(w, batch, guard), expected, strict=True):
                check(variant.multiply(product), one)
            narrow = -(-columns // 8)
            for product, one in zip(products(w, batch, guard), expected, strict=True):
                if product.kind is Kind.PLANES:
                    continue
                product.bit0 = guard(np.ascontiguousarray(product.bit0[:, :narrow]))
                product.bit1 = guard(np.ascontiguousarray(product.bit1[:, :narrow]))
                check(variant.multiply(product), one)
            for one in kept:
                one.check()


def test_outputs_end_where_they_should(variant):
    library = cpu._library()
    refused = ctypes.c_uint64()
    kinds = ((Kind.INT8, np.int8), (Kind.FLOAT32, np.float32))
    for columns, (kind, dtype) in itertools.product((1, 9, 64, 130, 700), kinds):
        w = ternary(3, columns)
        bit0, bit1 = planes(w)
        out = Guarded(np.zeros((3, columns), dtype), 4)
        status = library.storm_ternary_decode(
            bit0.ctypes.data, bit1.ctypes.data, bit0.shape[1], 3, columns, out.array.ctypes.data,
            kind, variant.variant, ctypes.byref(refused),
        )  # fmt: skip
        assert status == 0
        out.check()
        assert (out.array == w).all()
        narrow = -(-columns // 8)
        first, second = (Guarded(np.zeros((3, narrow), np.uint8), 3) for _ in range(2))
        status = library.storm_ternary_encode(
            out.array.ctypes.data, kind, 3, columns, -1.0, first.array.ctypes.data,
            second.array.ctypes.data, narrow, variant.variant, ctypes.byref(refused),
        )  # fmt: skip
        assert status == 0
        first.check()
        second.check()
        assert (first.array == bit0[:, :narrow]).all()


def unpacked(by: object, packed: np.ndarray, count: int) -> bytes | None:
    try:
        return b"".join(plane.tobytes() for plane in by.unpack(packed, count))
    except CorruptBlob:
        return None


def test_packing(variant):
    for count in (0, 1, 5, 63, 319, 320, 321, 640, 1599, 5000):
        bit0, bit1 = (plane[0] for plane in planes(ternary(1, count)))
        packed = reference.pack(bit0, bit1, count)
        check(variant.pack(bit0, bit1, count), packed)
        assert unpacked(variant, packed, count) == unpacked(reference, packed, count) is not None
        for place in {0, packed.size // 2, packed.size - 1} if count else ():
            for byte in (*range(0, 240, 17), *range(240, 256)):  # from 243 on they mean nothing
                broken = packed.copy()
                broken[place] = byte
                assert unpacked(variant, broken, count) == unpacked(reference, broken, count)


def test_dot(variant):
    for nbytes in (0, 1, 7, 8, 31, 64, 65, 1000):
        a, b = planes(ternary(1, 8 * nbytes)), planes(ternary(1, 8 * nbytes, seed=1))
        arrays = [Guarded(plane[0, :nbytes], 3).array for plane in (*a, *b)]
        assert variant.dot(*arrays) == reference.dot(*arrays), nbytes


def test_pairs_that_mean_nothing_are_refused(variant):
    w, x = ternary(4, 300), ternary(1, 300, seed=1)
    for place in (0, 129, 299):
        bit0, bit1 = planes(w)
        bit0[3, place // 8] &= ~np.uint8(1 << place % 8)
        bit1[3, place // 8] |= np.uint8(1 << place % 8)
        bits = planes(x)
        for product in (
            Product(bit0, bit1, 300, x, Kind.INT8),
            Product(bit0, bit1, 300, x.astype(np.float32), Kind.FLOAT32),
            Product(bit0, bit1, 300, bits[0], Kind.PLANES, bits[1]),
        ):
            with pytest.raises(CorruptBlob, match="bit0 = 0 with bit1 = 1"):
                variant.multiply(product)
        with pytest.raises(CorruptBlob, match=rf"\[3, {place}\]"):
            variant.decode(bit0, bit1, 300, Kind.INT8)
        with pytest.raises(CorruptBlob):
            variant.dot(bit0[3], bit1[3], bits[0][0], bits[1][0])
        with pytest.raises(CorruptBlob):
            variant.pack(bit0[3], bit1[3], 300)


def test_sums_beyond_32_bits(variant):
    """2^31 + 64 products of 1 with 1, all in one dot, and 2^24 + 64 of -128 with 1."""
    ones = np.full((1 << 28) + 8, 255, np.uint8)
    none = np.zeros_like(ones)
    assert variant.dot(ones, none, ones, none) == (1 << 31) + 64
    columns = (1 << 24) + 64
    x = np.full((1, columns), -128, np.int8)
    row = ones[: columns // 8].reshape(1, -1), none[: columns // 8].reshape(1, -1)
    for sign, planes_of_row in ((1, row), (-1, (row[0], row[0]))):
        found = variant.multiply(Product(*planes_of_row, columns, x, Kind.INT8))
        assert found.dtype == np.int64
        assert found.tolist() == [[-128 * columns * sign]]
    below = columns - 128  # the largest that is asked for in 32 bits
    cut = tuple(plane[:, : below // 8].copy() for plane in row)
    found = variant.multiply(Product(*cut, below, x[:, :below].copy(), Kind.INT8))
    assert found.dtype == np.int32
    assert found.tolist() == [[-128 * below]]


@needs_library
def test_a_variant_that_is_missing_names_those_that_are_there():
    missing = next(one for one in cpu.Variant if one not in VARIANTS and one >= 0)
    with pytest.raises(BackendUnavailable, match=f"{missing.name.lower()} is missing.*portable"):
        cpu.CpuTernary(missing).dot(*(np.zeros(8, np.uint8) for _ in range(4)))
