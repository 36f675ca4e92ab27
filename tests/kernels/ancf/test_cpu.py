"""The C library: every instruction set and any number of threads write the reference's bytes.

test_reference.py holds the best instruction set to the reference in depth; here each of the
others must agree with it on every path of the code.
"""

from __future__ import annotations

import numpy as np
import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode, cpu, reference
from storm_kernels.errors import BackendUnavailable
from storm_kernels.native import InstructionSet, available_sets

from .conftest import Guarded

available, detail = cpu.probe()
pytestmark = pytest.mark.skipif(not available, reason=f"C library: {detail}")

SETS = available_sets() if available else ()
MODES = ["auto", *(mode.name.lower() for mode in Mode)]


def encode(codec, data: np.ndarray, dtype: DType, offset: int = 0, **options) -> np.ndarray:
    source = Guarded(data.size, offset)
    source.data[:] = data
    target = Guarded(ancf.max_encoded_bytes(data.size, dtype), offset)
    size = codec.encode_into(
        source.address, data.size, dtype, target.address, target.data.size, **options
    )
    target.check()
    return target.data[:size].copy()


def decode(codec, blob: np.ndarray, nbytes: int, offset: int = 0, **options) -> np.ndarray:
    source = Guarded(blob.size, offset)
    source.data[:] = blob
    target = Guarded(nbytes, offset)
    try:
        codec.decode_into(source.address, blob.size, target.address, nbytes, **options)
    finally:
        target.check()
    return target.data.copy()


def check_all_sets(data: np.ndarray, dtype: DType, offset: int = 0, **options) -> None:
    expected = encode(reference, data, dtype, **options)
    for one in SETS:
        codec = cpu.CpuCodec(one)
        blob = encode(codec, data, dtype, offset, **options)
        assert blob.tobytes() == expected.tobytes(), f"{one.name}: another blob"
        assert (decode(codec, blob, data.size, offset) == data).all(), f"{one.name}: other bits"


def bell_shaped(count: int, dtype: DType, zeros: float) -> np.ndarray:
    """Return about normal elements, some of them +0: floats, or the high half of wider ones."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count)
    values[rng.random(count) < zeros] = 0.0
    if dtype.element_bytes == 8:
        return values.view(np.uint8)
    if dtype is DType.FLOAT16:
        return values.astype("<f2").view(np.uint8)
    wide = values.astype("<f4").view("<u4") >> (32 - dtype.width)
    return wide.astype(f"<u{dtype.element_bytes}").view(np.uint8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", list(DType))
def test_every_mode_and_dtype(dtype, mode):
    for speed, count, zeros in [
        ("fast", 9000, 0.0), ("dense", 9000, 0.0), ("fast", 4097, 0.5), ("dense", 12_321, 0.9),
        ("fast", 1, 0.0), ("dense", 33, 0.3), ("fast", 127, 0.5),
    ]:  # fmt: skip
        check_all_sets(bell_shaped(count, dtype, zeros), dtype, mode=mode, speed=speed)


@pytest.mark.parametrize("mode", ["auto", "sparse", "constant"])
@pytest.mark.parametrize("dtype", list(DType))
def test_zeros_of_either_sign(dtype, mode):
    elements = bell_shaped(4096 * 3 + 77, dtype, 0.0).view(f"<u{dtype.element_bytes}")
    sign = elements.dtype.type(1 << (dtype.width - 1))
    for count, zeros in [(1, 1.0), (129, 0.5), (4097, 0.5), (elements.size, 0.75)]:
        masked = np.random.default_rng(count).random(count) < zeros
        data = np.where(masked, elements[:count] & sign, elements[:count]).view(np.uint8)
        check_all_sets(data, dtype, mode=mode)
        check_all_sets(data, dtype, 1, mode=mode, checksum=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [DType.UINT8, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
def test_random_bits(dtype, mode):
    data = np.random.default_rng(0).integers(0, 256, 5000 * dtype.element_bytes, np.uint8)
    check_all_sets(data, dtype, mode=mode, speed="dense")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [1, 7, 33])
def test_unaligned_addresses(offset, mode):
    for dtype in (DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64):
        check_all_sets(bell_shaped(4500, dtype, 0.4), dtype, offset, mode=mode)


@pytest.mark.parametrize("count", range(0, 700, 13))
def test_small_sizes(count):
    for mode in ("window", "sparse", "boolean", "values", "integer"):
        check_all_sets(bell_shaped(count, DType.BFLOAT16, 0.5), DType.BFLOAT16, mode=mode)


@pytest.mark.parametrize("nbytes", [0, 1, 2047, 2048, 2049, 9_000_001])
def test_checksum_while_copying(nbytes):
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    expected = ancf.checksum.checksum(data)
    for one in SETS:
        for offset in (0, 5):
            copy = Guarded(nbytes, offset)
            address = data.ctypes.data
            found = cpu.library().storm_ancf_copy_checksum(copy.address, address, nbytes, one)
            copy.check()
            assert (copy.data == data).all()
            assert found == expected == cpu.library().storm_ancf_checksum(address, nbytes, one)


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_a_copy_and_its_checksum(backend):
    data = np.random.default_rng(1).integers(0, 256, 100_003, np.uint8)
    copy = np.zeros_like(data)
    found = ancf.host_backend(backend).copy_checksum(data.ctypes.data, copy.ctypes.data, data.size)
    assert found == ancf.checksum.checksum(data)
    assert (copy == data).all()


@pytest.mark.parametrize("threads", [2, 3, 64])
@pytest.mark.parametrize("mode", MODES)
def test_threads_do_not_show_in_the_bytes(mode, threads):
    """Large enough for several ranges of tiles, the last of them not whole."""
    for zeros in (0.0, 0.5):
        data = bell_shaped(4096 * 200 + 77, DType.BFLOAT16, zeros)
        codec = cpu.CpuCodec()
        alone = encode(codec, data, DType.BFLOAT16, mode=mode)
        blob = encode(codec, data, DType.BFLOAT16, mode=mode, threads=threads)
        assert blob.tobytes() == alone.tobytes()
        assert (decode(codec, blob, data.size, threads=threads) == data).all()


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("mode", ["window", "sparse", "values", "auto"])
@pytest.mark.parametrize("silent", [(0,), (0, 1), (1, 2), (3,)])
def test_ranges_without_records(silent, mode, checksum):
    """Of four threads' ranges of tiles some write no record bytes, the first ones among them."""
    elements = np.zeros((4, 4096 * 64), "<u2")
    noise = bell_shaped(elements.size, DType.BFLOAT16, 0.5).view("<u2").reshape(elements.shape)
    for quarter in set(range(4)) - set(silent):
        elements[quarter] = noise[quarter]
    data = elements.reshape(-1).view(np.uint8)
    options = {"mode": mode, "checksum": checksum}
    alone = encode(cpu.CpuCodec(), data, DType.BFLOAT16, **options)
    for threads in (2, 4):
        blob = encode(cpu.CpuCodec(), data, DType.BFLOAT16, threads=threads, **options)
        assert blob.tobytes() == alone.tobytes()


def test_threads_fall_back_to_raw_together():
    """Only the last range of tiles grows beyond what the others save."""
    data = bell_shaped(4096 * 256, DType.BFLOAT16, 0.0).copy()
    noise = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    data[data.size // 8 :] = noise[data.size // 8 :]
    for threads in (1, 4):
        blob = encode(cpu.CpuCodec(), data, DType.BFLOAT16, mode="window", threads=threads)
        assert ancf.read_header(blob).mode is Mode.RAW
        assert (decode(cpu.CpuCodec(), blob, data.size, threads=threads) == data).all()


def test_threads_notice_damage():
    """A changed bit of padding does no harm; every other one is noticed by whichever thread."""
    data = bell_shaped(4096 * 256, DType.BFLOAT16, 0.5)
    blob = encode(cpu.CpuCodec(), data, DType.BFLOAT16)
    noticed = 0
    for place in np.linspace(300, blob.size - 1, 20).astype(int):
        damaged = blob.copy()
        damaged[place] ^= 4
        try:
            assert (decode(cpu.CpuCodec(), damaged, data.size, threads=4) == data).all()
        except ancf.CorruptBlob:
            noticed += 1
    assert noticed >= 15


def test_at_least_one_thread_is_needed():
    data = np.zeros(512, np.uint8)
    with pytest.raises(ancf.UsageError, match="threads=0"):
        encode(cpu.CpuCodec(), data, DType.BFLOAT16, threads=0)


def test_missing_instruction_set_is_named():
    missing = [one for one in InstructionSet if one >= 0 and one not in SETS]
    data = np.zeros(512, np.uint8)
    for one in missing:
        with pytest.raises(BackendUnavailable, match=one.name.lower()):
            encode(cpu.CpuCodec(one), data, DType.BFLOAT16)
