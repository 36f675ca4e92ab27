"""The host backends: every one writes the reference's bytes and gives the original bits back.

`round_trip` (conftest) does the comparing, between guard bytes; the golden digests at the end
hold the reference itself to the bytes of version 1.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode

MODES = ["auto", *(mode.name.lower() for mode in Mode)]
SIZES = [0, 1, 31, 33, 1023, 1025, 4095, 4097, 12_288]
SPEEDS = ["fast", "dense"]
FLOATS = [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]


def normal(count: int, dtype: DType, seed: int = 0) -> np.ndarray:
    """Return N(0,1) elements as bytes."""
    values = np.random.default_rng(seed).standard_normal(count)
    if dtype is DType.BFLOAT16:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    return values.astype(f"<f{dtype.element_bytes}").view(np.uint8)


def random_bytes(count: int, dtype: DType, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * dtype.element_bytes, np.uint8)


def mode_of(blob: np.ndarray) -> Mode:
    return ancf.read_header(blob).mode


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_all_65536_patterns(round_trip, dtype, mode, speed):
    patterns = np.arange(1 << 16, dtype="<u2")
    round_trip(patterns.view(np.uint8), dtype, mode=mode, speed=speed)
    shuffled = np.random.default_rng(0).permutation(patterns)
    round_trip(shuffled.view(np.uint8), dtype, mode=mode, speed=speed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.BOOL, DType.INT8])
def test_all_256_patterns(round_trip, dtype, mode):
    patterns = np.repeat(np.arange(256, dtype=np.uint8), 40)
    round_trip(patterns, dtype, mode=mode)
    round_trip(np.tile(np.arange(256, dtype=np.uint8), 40), dtype, mode=mode, speed="dense")


@pytest.mark.parametrize("size", SIZES)
def test_sizes(round_trip, size):
    for dtype in FLOATS:
        data = normal(size, dtype)
        for mode in MODES:
            round_trip(data, dtype, mode=mode)


@pytest.mark.parametrize("speed", SPEEDS)
def test_a_million_and_one(round_trip, speed):
    blob = round_trip(normal(10**6 + 1, DType.BFLOAT16), DType.BFLOAT16, speed=speed)
    assert mode_of(blob) is Mode.WINDOW


@pytest.mark.parametrize("dtype", list(DType))
def test_every_mode_on_random_bits_of_every_dtype(round_trip, dtype):
    data = random_bytes(9000, dtype)
    for mode in MODES:
        blob = round_trip(data, dtype, mode=mode)
        assert blob.size <= ancf.max_encoded_bytes(data.size, dtype)


@pytest.mark.parametrize("mode", ["auto", "sparse"])
@pytest.mark.parametrize("zeros", [0.1, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_and_negative_zeros(round_trip, dtype, zeros, mode):
    rng = np.random.default_rng(1)
    elements = normal(10_000, dtype).view(f"<u{dtype.element_bytes}").copy()
    elements[rng.random(elements.size) < zeros] = 0
    elements[rng.integers(0, elements.size, 20)] = 1 << (dtype.width - 1)
    round_trip(elements.view(np.uint8), dtype, mode=mode)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("where", ["none", "one a tile", "at the edges", "all in one tile"])
def test_escapes(round_trip, where, speed):
    elements = np.full(5 * 4096, 0x3F80, "<u2") + np.arange(5 * 4096, dtype="<u2") % 128
    places = {
        "none": [],
        "one a tile": 4096 * np.arange(5) + 17 * np.arange(5),
        "at the edges": [0, 4095, 4096, 5 * 4096 - 1],
        "all in one tile": np.arange(4096, 8192),
    }[where]
    elements[places] = np.random.default_rng(0).integers(0, 1 << 16, len(places))
    blob = round_trip(elements.view(np.uint8), DType.BFLOAT16, mode="window", speed=speed)
    assert mode_of(blob) is Mode.WINDOW


@pytest.mark.parametrize("drop", [13, 16])
def test_truncated_floats_with_stragglers(round_trip, drop):
    elements = normal(100_000, DType.FLOAT32).view("<u4") >> drop << drop
    elements[40:43] |= 1  # between the first two runs of the sample
    blob = round_trip(elements.view(np.uint8), DType.FLOAT32)
    assert mode_of(blob) is Mode.TRUNCATED


def test_float32_kept_in_float64(round_trip):
    data = np.random.default_rng(0).standard_normal(9000).astype("<f4").astype("<f8")
    assert mode_of(round_trip(data.view(np.uint8), DType.FLOAT64)) is Mode.TRUNCATED


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros", [False, True])
def test_wide_distributions(round_trip, dtype, zeros):
    values = np.random.default_rng(0).standard_normal(20_000) ** 3
    if zeros:
        values[values < 0] = 0
    data = values.astype(f"<f{max(4, dtype.element_bytes)}")
    if dtype.width == 16:
        data = data.astype("<f2") if dtype is DType.FLOAT16 else data.view("<u2")[1::2].copy()
    blob = round_trip(data.view(np.uint8), dtype, speed="dense")
    assert ancf.read_header(blob).plan.k1 == 3


@pytest.mark.parametrize("policy", ["conservative", "adaptive", "aggressive"])
@pytest.mark.parametrize("distinct", [1, 2, 127, 128, 300, 1000])
def test_values(round_trip, distinct, policy):
    rng = np.random.default_rng(0)
    for dtype in FLOATS:
        table = rng.integers(0, 1 << 63, distinct, np.uint64).astype(f"<u{dtype.element_bytes}")
        data = table[rng.integers(0, distinct, 20_000)]
        round_trip(data.view(np.uint8), dtype, mode="values", policy=policy)


@pytest.mark.parametrize("scale", [1, 0.37])
def test_ternary(round_trip, scale):
    values = np.random.default_rng(0).integers(-1, 2, 9000).astype("<f4") * np.float32(scale)
    values[values == 0] = 0.0
    blob = round_trip(values.view(np.uint8), DType.FLOAT32)
    assert mode_of(blob) is Mode.TERNARY


@pytest.mark.parametrize("dtype", [DType.INT16, DType.INT32, DType.INT64])
@pytest.mark.parametrize("low", [0, -5, 1000])
def test_narrow_integers(round_trip, dtype, low):
    values = np.random.default_rng(0).integers(low, low + 100, 9000)
    values[8000] = 3000
    elements = values.astype(f"<i{dtype.element_bytes}")
    round_trip(elements.view(np.uint8), dtype)
    blob = round_trip(elements.view(np.uint8), dtype, mode="integer")
    assert mode_of(blob) is Mode.INTEGER


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT64, DType.INT8])
def test_integers_at_the_ends_of_their_range(round_trip, dtype):
    top = 1 << (dtype.width - 1)
    elements = np.array([0, 1, top - 1, top, 2 * top - 1] * 1000, f"<u{dtype.element_bytes}")
    round_trip(elements.view(np.uint8), dtype, mode="integer")


def test_constant_and_almost_constant(round_trip):
    elements = np.full(300_000, 0x4049, "<u2")
    assert mode_of(round_trip(elements.view(np.uint8), DType.BFLOAT16)) is Mode.CONSTANT
    elements[123_456] = 7
    assert mode_of(round_trip(elements.view(np.uint8), DType.BFLOAT16)) is Mode.SPARSE


def test_boolean(round_trip):
    data = (np.random.default_rng(0).random(70_001) < 0.1).astype(np.uint8)
    assert mode_of(round_trip(data, DType.BOOL)) is Mode.BOOLEAN
    data[-1] = 2
    assert mode_of(round_trip(data, DType.BOOL)) is Mode.RAW


@pytest.mark.parametrize("offset", [1, 2, 3, 7, 16, 33])
def test_unaligned_addresses(round_trip, offset):
    for mode in MODES:
        round_trip(normal(5000, DType.FLOAT32), DType.FLOAT32, offset, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_without_checksum(round_trip, mode):
    blob = round_trip(normal(5000, DType.BFLOAT16), DType.BFLOAT16, mode=mode, checksum=False)
    assert ancf.read_header(blob).checksum is None


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=12),
    runs=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 3000)), max_size=12),
    dtype=st.sampled_from(list(DType)),
    mode=st.sampled_from(MODES),
    speed=st.sampled_from(SPEEDS),
)
def test_any_runs_of_any_values(round_trip, seeds, runs, dtype, mode, speed):
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


@pytest.mark.parametrize("example", EXAMPLES)
def test_damage_is_noticed_or_harmless(codec, example):
    data, dtype, options = EXAMPLES[example]
    blob = codec.encode(data, dtype, **options)
    rng = np.random.default_rng(0)
    places = [*range(0, min(blob.size, 600), 7), *rng.integers(0, blob.size, 80)]
    for place in places:
        damaged = blob.copy()
        damaged[place] ^= 1 << int(rng.integers(8))
        assert_refused_or_right(codec, damaged, data)
    for size in [0, 1, 255, 256, 300, blob.size // 2, blob.size - 1]:
        with pytest.raises(ancf.CorruptBlob):
            codec.decode(blob[: min(size, blob.size - 1)], data.size)


@pytest.mark.parametrize("example", EXAMPLES)
def test_damage_without_checksum_stays_inside_the_buffers(codec, example):
    data, dtype, options = EXAMPLES[example]
    blob = codec.encode(data, dtype, checksum=False, **options)
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = blob.copy()
        start = int(rng.integers(256, max(257, blob.size - 40)))
        damaged[start : start + 40] = rng.integers(0, 256, damaged[start : start + 40].size)
        try:
            codec.decode(damaged, data.size)  # checks the guard bytes
        except ancf.CorruptBlob:
            continue


def assert_refused_or_right(codec, blob: np.ndarray, data: np.ndarray) -> None:
    try:
        decoded = codec.decode(blob, data.size)
    except ancf.CorruptBlob:
        return
    assert (decoded == data).all(), "a damaged blob was decoded to other bits"


def test_output_of_another_size_is_refused(codec):
    blob = codec.encode(normal(5000, DType.BFLOAT16), DType.BFLOAT16)
    for nbytes in (0, 9998, 10_002):
        with pytest.raises(ancf.CorruptBlob, match="10000"):
            codec.decode(blob, nbytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "zip"}, "'zip'"), ({"speed": "slow"}, "'slow'"), ({"policy": "bold"}, "'bold'")],
)
def test_unknown_options_are_refused(codec, options, message):
    with pytest.raises(ancf.UsageError, match=message):
        codec.encode(normal(10, DType.FLOAT32), DType.FLOAT32, **options)


def test_sizes_that_do_not_fit_are_refused(name):
    backend = ancf.host_backend(name)
    data = np.zeros(100, np.uint8)
    address = data.ctypes.data
    with pytest.raises(ancf.UsageError, match="no whole number"):
        backend.encode_into(address, 3, DType.FLOAT32, address, 100)
    with pytest.raises(ancf.UsageError, match="max_encoded_bytes says 260"):
        backend.encode_into(address, 4, DType.FLOAT32, address, 100)


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


@pytest.mark.parametrize("example", EXAMPLES)
def test_blobs_are_those_of_version_1(codec, example):
    data, dtype, options = EXAMPLES[example]
    blob = codec.encode(data, dtype, **options)
    size, digest = GOLDEN[example]
    assert (blob.size, hashlib.sha256(blob.tobytes()).hexdigest()[:16]) == (size, digest)
