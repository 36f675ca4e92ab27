"""The host backends: every one writes the reference's bytes and gives the original bits back.

`round_trip` (conftest) compares them all, each instruction set of the C library among them, between
guard bytes; the golden digests at the end hold the reference itself to the bytes of version 1.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode

from .conftest import CODECS, REFERENCE, Codec, normal, round_trip

MODES = ["auto", *(mode.name.lower() for mode in Mode)]
SPEEDS = ["fast", "dense"]
FLOATS = [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]


def mode_of(blob: np.ndarray) -> Mode:
    return ancf.read_header(blob).mode


@pytest.mark.parametrize("mode", MODES)
def test_all_patterns(mode):
    patterns = np.arange(1 << 16, dtype="<u2")
    shuffled = np.random.default_rng(0).permutation(patterns)
    round_trip(patterns.view(np.uint8), DType.BFLOAT16, mode=mode)
    round_trip(shuffled.view(np.uint8), DType.BFLOAT16, mode=mode, speed="dense")
    round_trip(shuffled.view(np.uint8), DType.FLOAT16, mode=mode)
    for dtype in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.BOOL, DType.INT8):
        round_trip(np.repeat(np.arange(256, dtype=np.uint8), 40), dtype, mode=mode)
        round_trip(np.tile(np.arange(256, dtype=np.uint8), 40), dtype, mode=mode, speed="dense")


@pytest.mark.parametrize("mode", MODES)
def test_sizes_and_alignment(mode):
    for dtype in FLOATS:
        for size, offset in [
            (0, 1), (1, 0), (31, 2), (33, 3), (127, 7), (1023, 16), (1025, 33), (4095, 1),
            (4097, 0), (12_288, 5),
        ]:  # fmt: skip
            round_trip(normal(size, dtype, zeros=0.4), dtype, offset, mode=mode)
    for size in range(0, 700, 37):
        round_trip(normal(size, DType.BFLOAT16, zeros=0.5), DType.BFLOAT16, mode=mode)


@pytest.mark.parametrize("speed", SPEEDS)
def test_many_elements(speed):
    count = 300_001
    blob = round_trip(normal(count, DType.BFLOAT16), DType.BFLOAT16, speed=speed)
    assert mode_of(blob) is Mode.WINDOW


@pytest.mark.parametrize("mode", MODES)
def test_every_dtype(mode):
    for dtype in DType:
        noise = np.random.default_rng(0).integers(0, 256, 5000 * dtype.element_bytes, np.uint8)
        blob = round_trip(noise, dtype, mode=mode, speed="dense")
        assert blob.size <= ancf.max_encoded_bytes(noise.size, dtype)
        for speed, zeros in [("fast", 0.0), ("dense", 0.0), ("fast", 0.5), ("dense", 0.9)]:
            round_trip(normal(5001, dtype, zeros), dtype, mode=mode, speed=speed)
        blob = round_trip(normal(127, dtype), dtype, mode=mode, checksum=False)
        assert ancf.read_header(blob).checksum is None


@pytest.mark.parametrize("mode", ["auto", "sparse", "constant"])
def test_zeros_of_either_sign(mode):
    for dtype in DType:
        elements = normal(4096 * 2 + 77, dtype).view(f"<u{dtype.element_bytes}")
        sign = elements.dtype.type(1 << (dtype.width - 1))
        for count, zeros in [(1, 1.0), (129, 0.5), (elements.size, 0.75), (elements.size, 0.99)]:
            masked = np.random.default_rng(count).random(count) < zeros
            data = np.where(masked, elements[:count] & sign, elements[:count])
            round_trip(data.view(np.uint8), dtype, 1, mode=mode)
        few = np.where(np.arange(elements.size) % 2, elements, 0).astype(elements.dtype)
        few[::500] = sign
        round_trip(few.view(np.uint8), dtype, mode=mode)


@pytest.mark.parametrize("speed", SPEEDS)
def test_escapes(speed):
    for places in (
        [],
        4096 * np.arange(5) + 17 * np.arange(5),  # one a tile
        [0, 4095, 4096, 5 * 4096 - 1],
        np.arange(4096, 8192),
    ):
        elements = np.full(5 * 4096, 0x3F80, "<u2") + np.arange(5 * 4096, dtype="<u2") % 128
        elements[places] = np.random.default_rng(0).integers(0, 1 << 16, len(places))
        blob = round_trip(elements.view(np.uint8), DType.BFLOAT16, mode="window", speed=speed)
        assert mode_of(blob) is Mode.WINDOW


def test_truncated_floats():
    for drop in (13, 16):
        elements = normal(100_000, DType.FLOAT32).view("<u4") >> drop << drop
        elements[40:43] |= 1  # between the first two runs of the sample
        assert mode_of(round_trip(elements.view(np.uint8), DType.FLOAT32)) is Mode.TRUNCATED
    wide = normal(9000, DType.FLOAT32).view("<f4").astype("<f8")
    assert mode_of(round_trip(wide.view(np.uint8), DType.FLOAT64)) is Mode.TRUNCATED


@pytest.mark.parametrize("zeros", [False, True])
def test_wide_distributions(zeros):
    values = np.random.default_rng(0).standard_normal(20_000) ** 3
    if zeros:
        values[values < 0] = 0
    for dtype in FLOATS:
        data = values.astype(f"<f{max(4, dtype.element_bytes)}")
        if dtype.width == 16:
            data = data.astype("<f2") if dtype is DType.FLOAT16 else data.view("<u2")[1::2].copy()
        blob = round_trip(data.view(np.uint8), dtype, speed="dense")
        assert ancf.read_header(blob).plan.k1 == 3, dtype


@pytest.mark.parametrize("policy", ["conservative", "adaptive", "aggressive"])
def test_values(policy):
    rng = np.random.default_rng(0)
    for distinct in (1, 2, 127, 128, 300, 1000):
        for dtype in FLOATS:
            table = rng.integers(0, 1 << 63, distinct, np.uint64).astype(f"<u{dtype.element_bytes}")
            data = table[rng.integers(0, distinct, 9000)]
            round_trip(data.view(np.uint8), dtype, mode="values", policy=policy)


def test_modes_of_few_values():
    for scale in (1, 0.37):
        values = np.random.default_rng(0).integers(-1, 2, 9000).astype("<f4") * np.float32(scale)
        values[values == 0] = 0.0
        assert mode_of(round_trip(values.view(np.uint8), DType.FLOAT32)) is Mode.TERNARY
    elements = np.full(300_000, 0x4049, "<u2")
    assert mode_of(round_trip(elements.view(np.uint8), DType.BFLOAT16)) is Mode.CONSTANT
    elements[123_456] = 7
    assert mode_of(round_trip(elements.view(np.uint8), DType.BFLOAT16)) is Mode.SPARSE
    data = (np.random.default_rng(0).random(70_001) < 0.1).astype(np.uint8)
    assert mode_of(round_trip(data, DType.BOOL)) is Mode.BOOLEAN
    data[-1] = 2
    assert mode_of(round_trip(data, DType.BOOL)) is Mode.RAW


def test_integers():
    for dtype in (DType.INT16, DType.INT32, DType.INT64):
        for low in (0, -5, 1000):
            values = np.random.default_rng(0).integers(low, low + 100, 9000)
            values[8000] = 3000
            elements = values.astype(f"<i{dtype.element_bytes}").view(np.uint8)
            round_trip(elements, dtype)
            assert mode_of(round_trip(elements, dtype, mode="integer")) is Mode.INTEGER
    for dtype in (DType.INT64, DType.UINT64, DType.INT8):
        top = 1 << (dtype.width - 1)
        ends = np.array([0, 1, top - 1, top, 2 * top - 1] * 1000, f"<u{dtype.element_bytes}")
        round_trip(ends.view(np.uint8), dtype, mode="integer")


@given(
    seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=12),
    runs=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 3000)), max_size=12),
    dtype=st.sampled_from(list(DType)),
    mode=st.sampled_from(MODES),
    speed=st.sampled_from(SPEEDS),
)
def test_any_runs_of_any_values(seeds, runs, dtype, mode, speed):
    table = np.array(seeds, np.uint64)
    pieces = [np.full(length, table[i % table.size]) for i, length in runs]
    elements = np.concatenate([table, *pieces]).astype(f"<u{dtype.element_bytes}")
    round_trip(elements.view(np.uint8), dtype, mode=mode, speed=speed)


def bell(count: int) -> np.ndarray:
    """Return bell-shaped float32 that are the same with every version of NumPy."""
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    lanes = mixed.view("<u2").reshape(-1, 4).astype(np.int64)
    return ((lanes.sum(axis=1) - 131_070) / 32_768).astype("<f4")


def examples() -> dict[str, tuple[np.ndarray, DType, dict[str, str]]]:
    """Return one small input for each way to lay out a blob."""
    fp32 = bell(9000)
    bf16 = (fp32.view("<u4") >> 16).astype("<u2")
    relu = np.where(bf16 >> 15, 0, bf16).astype("<u2")
    rare = np.where(np.arange(9000) % 5, 0, bf16).astype("<u2")
    signs = (bf16 & 0x8000).astype("<u2")
    masked = np.where(np.arange(9000) % 2, signs, bf16)
    tokens = (fp32 * 8000 + 25_000).astype("<i8")
    inputs = {
        "raw": (bf16, DType.BFLOAT16, {"mode": "raw"}),
        "fast": (bf16, DType.BFLOAT16, {}),
        "dense": (bf16, DType.BFLOAT16, {"speed": "dense"}),
        "wide": (
            ((fp32 * fp32 * fp32).view("<u4") >> 16).astype("<u2"),
            DType.BFLOAT16,
            {"speed": "dense"},
        ),
        "dense float32": (fp32, DType.FLOAT32, {"speed": "dense"}),
        "plain bitmap": (relu, DType.BFLOAT16, {}),
        "pairs": (rare, DType.BFLOAT16, {}),
        "signs apart": (masked, DType.BFLOAT16, {}),
        "pairs, signs apart": (np.where(rare, bf16, signs), DType.BFLOAT16, {}),
        "truncated": (fp32.view("<u4") >> 16 << 16, DType.FLOAT32, {}),
        "boolean": ((bf16 & 1).astype(np.uint8), DType.BOOL, {}),
        "constant": (np.full(9000, 7, np.uint8), DType.UINT8, {}),
        "ternary": ((bf16 % 3).astype(np.uint8), DType.UINT8, {"mode": "ternary"}),
        "values": (relu, DType.BFLOAT16, {"mode": "values"}),
        "integer": (tokens, DType.INT64, {}),
    }
    return {key: (data.view(np.uint8), *rest) for key, (data, *rest) in inputs.items()}


EXAMPLES = examples()


@pytest.mark.parametrize("backend", CODECS)
def test_damage_is_noticed_or_harmless(backend):
    codec, rng = CODECS[backend], np.random.default_rng(0)
    for data, dtype, options in EXAMPLES.values():
        blob = REFERENCE.encode(data, dtype, **options)
        for place in [*range(0, min(blob.size, 600), 13), *rng.integers(0, blob.size, 40)]:
            damaged = blob.copy()
            damaged[place] ^= 1 << int(rng.integers(8))
            assert_refused_or_right(codec, damaged, data)
        for size in [0, 1, 255, 256, 300, blob.size // 2, blob.size - 1]:
            with pytest.raises(ancf.CorruptBlob):
                codec.decode(blob[: min(size, blob.size - 1)], data.size)


def assert_refused_or_right(codec: Codec, blob: np.ndarray, data: np.ndarray) -> None:
    try:
        decoded = codec.decode(blob, data.size)
    except ancf.CorruptBlob:
        return
    assert (decoded == data).all(), "a damaged blob was decoded to other bits"


@pytest.mark.parametrize("backend", CODECS)
def test_damage_without_checksum_stays_inside_the_buffers(backend):
    rng = np.random.default_rng(0)
    for data, dtype, options in EXAMPLES.values():
        blob = REFERENCE.encode(data, dtype, checksum=False, **options)
        for _ in range(20):
            damaged = blob.copy()
            start = int(rng.integers(256, max(257, blob.size - 40)))
            damaged[start : start + 40] = rng.integers(0, 256, damaged[start : start + 40].size)
            try:
                CODECS[backend].decode(damaged, data.size)  # checks the guard bytes
            except ancf.CorruptBlob:
                continue


@pytest.mark.parametrize("name", ["numpy", "cpu"])
def test_what_does_not_fit_is_refused(name):
    backend = ancf.host_backend(name)
    data = np.zeros(10_000, np.uint8)
    address = data.ctypes.data
    with pytest.raises(ancf.UsageError, match="12 bytes are no whole number of float64 elements"):
        backend.encode_into(address, 12, DType.FLOAT64, address, 1000)
    with pytest.raises(ancf.UsageError, match="-8 bytes"):
        backend.encode_into(address, -8, DType.FLOAT64, address, 1000)
    with pytest.raises(ancf.UsageError, match="output of 263 bytes, max_encoded_bytes says 264"):
        backend.encode_into(address, 8, DType.FLOAT64, address, 263)
    blob = Codec(backend).encode(data, DType.BFLOAT16)
    for nbytes in (0, 9998, 10_002):
        with pytest.raises(ancf.CorruptBlob, match="10000"):
            Codec(backend).decode(blob, nbytes)


GOLDEN = {  # bytes, and the start of the SHA-256
    "raw": (18256, "8cc3604620463db0"),
    "fast": (13112, "3f3f5a3f2e12c8cc"),
    "dense": (12600, "8d1264733a86d12e"),
    "wide": (14560, "65c8d9541aa7967a"),
    "dense float32": (30776, "6649f11665e8efa9"),
    "plain bitmap": (7088, "2563540b025e4eb9"),
    "pairs": (3832, "abc06a4868a60304"),
    "signs apart": (8184, "bd1adcc3bfe82ddf"),
    "pairs, signs apart": (4736, "6f7fe2ad306a9a93"),
    "truncated": (12680, "a21fbcc8e0e34979"),
    "boolean": (1392, "d2b660d1533dce92"),
    "constant": (256, "056589375877623c"),
    "ternary": (2784, "84d2bc8cffbe3725"),
    "values": (14864, "1ee59af929d0bafd"),
    "integer": (18480, "e622cd80066c4526"),
}


def test_blobs_are_those_of_version_1():
    for name, (data, dtype, options) in EXAMPLES.items():
        blob = round_trip(data, dtype, **options)
        found = (blob.size, hashlib.sha256(blob.tobytes()).hexdigest()[:16])
        assert found == GOLDEN[name], name
