"""The CUDA kernels, run on the CPU by tests/kernels/cuda_on_cpu: the reference's bytes, each time.

Every CUDA thread is a fibre and every barrier a real one, so that what is checked here is the
kernels' logic; what only a device can show is in test_cuda.py, and whether the same sources
compile for one in test_cuda_sources.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from storm_kernels.ancf import DType, read_header, reference
from storm_kernels.ancf.checksum import checksum as checksum_of
from storm_kernels.ancf.checksum import from_sums
from storm_kernels.ancf.cuda_launches import ENCODE_WARPS, PIPELINES, decoding, pipeline_of
from storm_kernels.ancf.header import Header
from storm_kernels.ancf.layout import Mode
from storm_kernels.ancf.options import POLICIES
from storm_kernels.ancf.plan import Plan
from support.cuda_on_cpu import NOT_DECODED, OK, POISON

UNDER_FENCES = Path(__file__).with_name("cuda_under_fences.py")
FLOATS = [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]
E4M3 = DType.FLOAT8_E4M3FN
RARE = (DType.FLOAT16, DType.FLOAT64, DType.INT64, DType.UINT64, DType.FLOAT8_E5M2)
"""Types whose kernels have no other use here: to compile each kind takes 3 to 5 s."""


def of_types(*dtypes: DType) -> list[object]:
    """Parameters, slow ones where the kernels would be compiled for them alone."""
    slow = pytest.mark.slow
    return [pytest.param(one, marks=slow if one in RARE else (), id=one.name) for one in dtypes]


@pytest.fixture
def check(kernels) -> Callable[..., np.ndarray]:
    """Encode, compare with the reference's blob, decode, compare the bits."""

    def run(data: np.ndarray, dtype: DType, **options) -> np.ndarray:
        launch = {
            key: options.pop(key) for key in ("blocks", "unit_tiles", "offset") if key in options
        }
        expected = reference.encode(data, dtype, **options)
        blob = kernels(dtype).encode(data, dtype, **options, **launch)
        assert blob.tobytes() == expected.tobytes()
        launch.pop("unit_tiles", None)
        status, same = kernels(dtype).decode(expected, data.size, **launch)
        assert status == OK
        assert (same == data).all()
        return blob

    return run


def bits(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of numbers as elements of a floating-point type."""
    if dtype is DType.BFLOAT16:
        words = np.asarray(values, np.float32).view(np.uint32)
        return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    kinds = {DType.FLOAT16: np.float16, DType.FLOAT32: np.float32, DType.FLOAT64: np.float64}
    return np.asarray(values, kinds[dtype]).view(np.uint8)


def tensors(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(count)
    words = normal.astype(np.float32).view(np.uint32)
    mask, bf16 = rng.random(count), (words & np.uint32(0xFFFF0000)).view(np.float32)
    return {
        "normal": normal,
        "relu": np.maximum(normal, 0),
        "few": np.where(rng.random(count) < 0.1, normal, 0),
        "masked": normal * (mask < 0.25),
        "half masked": normal * (mask < 0.5),
        "masked bf16": bf16 * (mask < 0.25),
        "silu": normal / (1 + np.exp(-3 * normal)),
        "same": np.full(count, 1.5),
        "nearly the same": np.where(np.arange(count) == count - 2, 7.0, 1.5),
        "three values": np.sign(normal) * (abs(normal) > 0.8) * 0.37,
        "bf16": bf16,
        "tf32": (words & np.uint32(0xFFFFE000)).view(np.float32),
        "steps": np.round(normal * 40) / 40,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", of_types(*FLOATS))
def test_floats_choose_and_encode_as_the_reference(check, dtype):
    for name, values in tensors(9_000).items():
        check(bits(values, dtype), dtype)
        check(bits(values, dtype), dtype, speed="dense", checksum=name != "relu")


@pytest.mark.parametrize("dtype", of_types(*FLOATS, DType.UINT8, DType.FLOAT8_E5M2))
def test_launches_have_the_warps_that_the_kernels_count_on(kernels, dtype):
    for number, pipeline in enumerate(PIPELINES):
        launched = ENCODE_WARPS.get(f"ancf_encode_{pipeline}", {}).get(dtype.element_bytes, 16)
        assert kernels(dtype).encode_warps(number) == launched
        assert kernels(dtype).decode_warps(number) * 32 == decoding(1, dtype, pipeline, 1).threads


@pytest.mark.parametrize(
    ("dtype", "blocks"),
    [(DType.BFLOAT16, 3), pytest.param(DType.FLOAT32, 1, marks=pytest.mark.slow)],
)
def test_a_guess_of_the_pipeline_changes_no_bit_and_a_wrong_one_makes_a_raw_blob(
    kernels, dtype, blocks
):
    random = np.random.default_rng(3).integers(0, 256, 18_000, dtype=np.uint8)
    cases = {name: bits(values, dtype) for name, values in tensors(9_000).items()}
    for name, data in {**cases, "random": random, "nothing": random[:0]}.items():
        chosen = reference.encode(data, dtype)
        raw = reference.encode(data, dtype, mode="raw")
        right = pipeline_of(Mode(int(chosen[6])).name.lower())
        for likely in PIPELINES:
            blob = kernels(dtype).encode(data, dtype, blocks=blocks, likely=likely)
            if right is None:  # which several encoders find
                assert blob.tobytes() in (chosen.tobytes(), raw.tobytes()), (name, likely)
            else:
                wanted = chosen if likely == right else raw
                assert blob.tobytes() == wanted.tobytes(), (name, likely)


@pytest.mark.parametrize("dtype", of_types(DType.BFLOAT16, DType.FLOAT8_E5M2))
def test_warps_in_any_order(kernels, check, dtype):
    for seed in (1, 2):
        normal = np.random.default_rng(seed).standard_normal(4096 * 3 + 77)
        high_bytes = bits(normal, DType.FLOAT16)[1::2]
        data = high_bytes if dtype is DType.FLOAT8_E5M2 else bits(normal, dtype)
        kernels(dtype).mix_warps(seed)
        try:
            for mode, speed in (("window", "fast"), ("window", "dense"), ("sparse", "dense")):
                blob = check(data.copy(), dtype, mode=mode, speed=speed)
                assert read_header(blob).mode.name.lower() == mode
        finally:
            kernels(dtype).mix_warps(0)


@pytest.mark.parametrize("dtype", of_types(DType.BFLOAT16, DType.FLOAT32))
def test_forced_modes(check, dtype):
    values = tensors(9_000)
    random = np.random.default_rng(1).integers(0, 256, 18_000, dtype=np.uint8)
    for mode in Mode:
        for name in ("normal", "few", "bf16", "steps"):
            check(bits(values[name], dtype), dtype, mode=mode.name.lower())
        check(random, dtype, mode=mode.name.lower())


@pytest.mark.parametrize("dtype", of_types(DType.BFLOAT16, DType.FLOAT64))
def test_dictionaries_out_of_all_symbols(check, dtype):
    """Every symbol occurs, and the frequent ones are 32 apart, so that one lane ranks them all."""
    symbols = np.arange(1 << (dtype.width - dtype.mantissa_bits))
    for heavy in (20, 100):
        frequent = symbols[5::32][:heavy]
        repeats = 2 + (18_000 / np.arange(2, 2 + frequent.size) ** 2).astype(int)
        chosen = np.concatenate([symbols, np.repeat(frequent, repeats)])
        np.random.default_rng(heavy).shuffle(chosen)
        shift = np.array(dtype.mantissa_bits, f"<u{dtype.element_bytes}")
        elements = chosen.astype(shift.dtype) << shift
        blob = check(elements.view(np.uint8), dtype, mode="window", speed="dense")
        assert read_header(blob).mode is Mode.WINDOW


@pytest.mark.parametrize(
    "dtype",
    of_types(
        DType.INT8, DType.UINT8, DType.BYTES, DType.INT16, DType.UINT16, DType.INT32, DType.INT64,
        DType.UINT64,
    ),
)  # fmt: skip
def test_integers(check, dtype):
    rng = np.random.default_rng(3)
    kind = f"<i{dtype.element_bytes}"
    for least, most in ((0, 50), (-30, 50), (5, 6), (-(2**62), 2**62)):
        check(rng.integers(least, most, 9_000).astype(kind).view(np.uint8), dtype)
    few = rng.integers(0, 9, 9_000) * (rng.random(9_000) < 0.1)
    check(few.astype(kind).view(np.uint8), dtype)


@pytest.mark.parametrize("dtype", of_types(DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.BOOL))
def test_bytes(check, dtype):
    rng = np.random.default_rng(4)
    check(rng.integers(0, 2 if dtype is DType.BOOL else 256, 9_001, dtype=np.uint8), dtype)
    check(rng.binomial(200, 0.5, 9_001).astype(np.uint8), dtype, speed="dense")


@pytest.mark.parametrize("policy", POLICIES)
def test_value_dictionaries(check, policy):
    values = tensors(9_000)
    for name in ("normal", "few", "half masked", "same", "three values"):
        check(bits(values[name], DType.BFLOAT16), DType.BFLOAT16, mode="values", policy=policy)


@pytest.mark.parametrize("count", [0, 1, 31, 33, 1023, 1025, 4095, 4096, 4097, 12_289])
def test_sizes_and_alignment(check, count):
    data = bits(tensors(12_289)["normal"], DType.BFLOAT16)[: 2 * count]
    check(data, DType.BFLOAT16, blocks=2, unit_tiles=1, offset=2)
    check(data, DType.BFLOAT16, mode="sparse", speed="dense", unit_tiles=4)


@pytest.mark.parametrize("dtype", of_types(DType.BYTES, *FLOATS))
def test_checksums_of_spans(kernels, dtype):
    """Any bytes, whatever element type the module is for, and however many share the chunks."""
    for blocks, offset in ((1, 0), (2, 3), (3, 8), (4, 1)):
        rng = np.random.default_rng(blocks)
        sizes = (1, 2048, 0, 31, 2047, 2049, 16 * 2048, 65_537)
        parts = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        sums = kernels(dtype).check(parts, blocks=blocks, offset=offset)
        for part, own in zip(parts, sums, strict=True):
            assert from_sums(own.tolist(), part.size) == checksum_of(part), (blocks, offset)


def test_a_header_with_that_checksum_and_the_bytes_are_the_raw_blob(kernels):
    data = np.random.default_rng(0).integers(0, 256, 5 * 2048 + 77, dtype=np.uint8)
    (sums,) = kernels(DType.BYTES).check([data], blocks=2)
    found = from_sums(sums.tolist(), data.size)
    header = Header(Plan(Mode.RAW), DType.BYTES, data.size, 0, found).pack()
    raw = kernels(DType.BYTES).encode(data, DType.BYTES, mode="raw")
    assert header + data.tobytes() == raw.tobytes()


@pytest.mark.parametrize("dtype", of_types(*FLOATS, DType.FLOAT8_E4M3FN))
def test_zeros_of_either_sign(check, dtype):
    """The second tile is random bits: more second codes and escapes than a warp keeps."""
    for count in (1, 129, 4097, 12_289):
        rng = np.random.default_rng(count)
        data = rng.integers(0, 256, count * dtype.element_bytes, dtype=np.uint8)
        elements = data.view(f"<u{dtype.element_bytes}")
        sign = 1 << (dtype.width - 1)
        elements[(rng.random(count) < 0.9) & (np.arange(count) // 4096 != 1)] &= sign
        blob = check(data, dtype, mode="sparse", blocks=2)
        assert read_header(blob).plan.keeps_signs_apart or count < 4096  # raw
        check(data, dtype)


@pytest.mark.parametrize("mode", ["window", "sparse"])
def test_all_patterns(check, mode):
    data = np.random.default_rng(0).permutation(np.arange(1 << 16, dtype=np.uint16))
    check(data.view(np.uint8), DType.BFLOAT16, mode=mode, unit_tiles=4)
    spread = np.where(np.arange(1 << 16) % 3, np.uint16(0x3F80), data)
    check(spread.view(np.uint8), DType.BFLOAT16, mode=mode, speed="dense", blocks=2)


@pytest.mark.parametrize("mode", ["window", "sparse", "values", "integer", "boolean", "raw"])
def test_damage_is_told_and_nothing_else_touched(kernels, mode):
    rng = np.random.default_rng(5)
    data = bits(tensors(9_000)["few"], DType.BFLOAT16)
    for checksum in (True, False):
        blob = reference.encode(data, DType.BFLOAT16, mode=mode, speed="dense", checksum=checksum)
        for _ in range(12):
            damaged = blob.copy()
            for place in rng.integers(0, blob.size, 1 + rng.integers(3)):
                damaged[place] ^= 1 << rng.integers(8)
            cut = blob.size - int(rng.integers(1, blob.size)) if rng.random() < 0.2 else blob.size
            status, out = kernels(DType.BFLOAT16).decode(damaged[:cut], data.size)
            assert status != OK or not checksum or (out == data).all()


def test_kernels_of_another_element_type_touch_nothing_and_say_so(kernels):
    data = bits(tensors(5_000)["few"], DType.BFLOAT16)
    for mode in ("window", "sparse", "raw"):
        blob = reference.encode(data, DType.BFLOAT16, mode=mode)
        status, out = kernels(DType.FLOAT32).decode(blob, data.size)
        assert status == NOT_DECODED
        assert (out == POISON).all()


@pytest.mark.parametrize(
    "dtype",
    [DType.BFLOAT16, *(pytest.param(one, marks=pytest.mark.slow) for one in (*FLOATS[1:], E4M3))],
)
def test_nothing_outside_of_fences_is_touched(cuda_on_cpu, dtype):
    """In a process of its own, which an access outside ends, or one that is not aligned."""
    done = subprocess.run(
        [sys.executable, str(UNDER_FENCES), str(cuda_on_cpu), dtype.name],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}"
    assert "blobs decoded" in done.stdout
