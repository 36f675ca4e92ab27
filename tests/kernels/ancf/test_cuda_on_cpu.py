"""The CUDA kernels, run on the CPU by tests/kernels/cuda_on_cpu: the reference's bytes, each time.

Every CUDA thread is a fibre and every barrier a real one, so that what is checked here is the
kernels' logic; what only a device can show is in test_cuda.py. One library a kind of element is
built by the C++ compiler at first use. The same sources must also compile for real devices.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, layout, reference
from storm_kernels.ancf.layout import Mode
from storm_kernels.ancf.options import POLICIES

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "kernels/storm_kernels/ancf"
HOST = ROOT / "tests/kernels/cuda_on_cpu"
GUARD = 64
POISON = 0xA5
AUTO = 255
OK, BAD_HEADER, BAD_RECORD, BAD_CHECKSUM = range(4)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) here"),
]


class Guarded:
    """Poisoned memory aligned to 16 bytes plus `offset`, whose surroundings must stay."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self._memory = np.full(nbytes + 2 * GUARD + 16, POISON, np.uint8)
        self._start = GUARD + (-(self._memory.ctypes.data + GUARD) % 16) + offset
        self.data = self._memory[self._start : self._start + nbytes]

    @property
    def address(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._memory.ctypes.data + self._start)

    def check(self) -> None:
        end = self._start + self.data.size
        assert (self._memory[: self._start] == POISON).all(), "bytes before the buffer written"
        assert (self._memory[end:] == POISON).all(), "bytes after the buffer written"


class Kernels:
    """The kernels of one kind of element as host functions."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.scratch_bytes.restype = ctypes.c_uint64

    def _scratch(self, nbytes: int) -> Guarded:
        return Guarded(self._library.scratch_bytes(ctypes.c_uint64(nbytes)))

    def encode(
        self, data: np.ndarray, dtype: DType, *, mode: str = "auto", speed: str = "fast",
        checksum: bool = True, policy: str = "adaptive", blocks: int = 1, unit_tiles: int = 2,
        offset: int = 0,
    ) -> np.ndarray:  # fmt: skip
        source, target = (
            Guarded(data.size, offset),
            Guarded(ancf.max_encoded_bytes(data.size, dtype)),
        )
        source.data[:] = data
        scratch, result = self._scratch(data.size), Guarded(24)
        number = AUTO if mode == "auto" else int(Mode[mode.upper()])
        failed = self._library.encode(
            source.address, ctypes.c_uint64(data.size), target.address, scratch.address,
            result.address, int(dtype), number, int(speed == "dense"), int(checksum),
            POLICIES.index(policy), blocks, unit_tiles,
        )  # fmt: skip
        assert not failed, "threads wait for each other for ever"
        for buffer in (source, target, scratch, result):
            buffer.check()
        size, status, _ = result.data.view(np.uint64).tolist()
        assert status == OK
        return target.data[:size].copy()

    def decode(self, blob: np.ndarray, nbytes: int, *, blocks: int = 1, offset: int = 0):
        source, target = Guarded(blob.size), Guarded(nbytes, offset)
        source.data[:] = blob
        scratch, status = self._scratch(nbytes), Guarded(8)
        failed = self._library.decode(
            source.address, ctypes.c_uint64(blob.size), target.address, ctypes.c_uint64(nbytes),
            scratch.address, status.address, blocks,
        )  # fmt: skip
        assert not failed, "threads wait for each other for ever"
        for buffer in (source, target, scratch, status):
            buffer.check()
        return int(status.data.view(np.uint64)[0]), target.data.copy()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Callable[[DType], Kernels]:
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    built: dict[tuple[int, int], Kernels] = {}

    def build(dtype: DType) -> Kernels:
        kind = (dtype.element_bytes, dtype.mantissa_bits)
        if kind not in built:
            library = folder / f"kernels_{kind[0]}_{kind[1]}.so"
            subprocess.run(
                ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{HOST}", f"-I{SOURCES}",
                 f"-DANCF_WIDTH={kind[0]}", f"-DANCF_MANTISSA={kind[1]}", "-o", library,
                 HOST / "run_kernels.cpp"],
                check=True, timeout=300,
            )  # fmt: skip
            built[kind] = Kernels(library)
        return built[kind]

    return build


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
    return {
        "normal": normal,
        "relu": np.maximum(normal, 0),
        "few": np.where(rng.random(count) < 0.1, normal, 0),
        "silu": normal / (1 + np.exp(-3 * normal)),
        "same": np.full(count, 1.5),
        "nearly the same": np.where(np.arange(count) == count - 2, 7.0, 1.5),
        "three values": np.sign(normal) * (abs(normal) > 0.8) * 0.37,
        "bf16": (words & np.uint32(0xFFFF0000)).view(np.float32),
        "tf32": (words & np.uint32(0xFFFFE000)).view(np.float32),
        "steps": np.round(normal * 40) / 40,
    }  # fmt: skip


FLOATS = [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_floats_choose_and_encode_as_the_reference(check, dtype):
    for name, values in tensors(12_500).items():
        check(bits(values, dtype), dtype)
        check(bits(values, dtype), dtype, speed="dense", checksum=name != "relu")


@pytest.mark.parametrize("mode", [mode.name.lower() for mode in Mode])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32], ids=lambda d: d.name)
def test_forced_modes(check, dtype, mode):
    values = tensors(9_000)
    for name in ("normal", "few", "bf16", "steps"):
        check(bits(values[name], dtype), dtype, mode=mode)
    check(np.random.default_rng(1).integers(0, 256, 18_000, dtype=np.uint8), dtype, mode=mode)


INTEGERS = [
    DType.INT8, DType.UINT8, DType.BYTES, DType.INT16, DType.UINT16, DType.INT32, DType.INT64,
    DType.UINT64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.name)
def test_integers(check, dtype):
    rng = np.random.default_rng(3)
    kind = f"<i{dtype.element_bytes}"
    for least, most in ((0, 50), (-30, 50), (5, 6), (-(2**62), 2**62)):
        check(rng.integers(least, most, 9_000).astype(kind).view(np.uint8), dtype)
    check(
        (rng.integers(0, 9, 9_000) * (rng.random(9_000) < 0.1)).astype(kind).view(np.uint8), dtype
    )


@pytest.mark.parametrize(
    "dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.BOOL], ids=lambda d: d.name
)
def test_bytes(check, dtype):
    rng = np.random.default_rng(4)
    check(rng.integers(0, 2 if dtype is DType.BOOL else 256, 9_001, dtype=np.uint8), dtype)
    check(rng.binomial(200, 0.5, 9_001).astype(np.uint8), dtype, speed="dense")


@pytest.mark.parametrize("policy", POLICIES)
def test_value_dictionaries(check, policy):
    for values in tensors(9_000).values():
        check(bits(values, DType.BFLOAT16), DType.BFLOAT16, mode="values", policy=policy)


@pytest.mark.parametrize("count", [0, 1, 31, 33, 1023, 1025, 4095, 4096, 4097, 12_289])
def test_sizes_and_alignment(check, count):
    data = bits(tensors(12_289)["normal"], DType.BFLOAT16)[: 2 * count]
    check(data, DType.BFLOAT16, blocks=2, unit_tiles=1, offset=2)
    check(data, DType.BFLOAT16, mode="sparse", speed="dense", unit_tiles=4)


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


def test_the_header_holds_the_formats_numbers():
    text = (SOURCES / "ancf_format.cuh").read_text()
    numbers = {
        "kTile": layout.TILE, "kHeaderBytes": layout.HEADER_BYTES, "kVersion": layout.VERSION,
        "kDirectoryAlign": layout.DIRECTORY_ALIGN, "kRecordUnit": layout.RECORD_UNIT,
        "kSampleMax": layout.SAMPLE_MAX, "kSampleRun": layout.SAMPLE_RUN,
        "kWindowSlots": layout.WINDOW_SLOTS, "kCheckChunkBytes": layout.CHECK_CHUNK_BYTES,
    }  # fmt: skip
    for name, value in numbers.items():
        assert f" {name} = {value};" in text
    for value in (*layout.CHECK_KEYS, layout.CHECK_INDEX, layout.CHECK_MIX, layout.CHECK_LENGTH):
        assert f"0x{value:08X}" in text
    assert f"0x{int.from_bytes(layout.MAGIC, 'little'):08X}" in text
    for mode in Mode:
        assert f"k{mode.name.capitalize()} = {int(mode)}" in text


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler (nvcc) here")
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", ["ancf_choose", "ancf_values", "ancf_encode", "ancf_decode"])
def test_sources_compile_for_devices(tmp_path, source, target):
    subprocess.run(
        ["nvcc", "-std=c++17", f"-arch={target}", f"-I{SOURCES}", "-DANCF_WIDTH=2",
         "-DANCF_MANTISSA=7", "-diag-suppress=177,186", "-cubin", "-o", tmp_path / "kernels.cubin",
         SOURCES / f"{source}.cu"],
        check=True, timeout=300,
    )  # fmt: skip
