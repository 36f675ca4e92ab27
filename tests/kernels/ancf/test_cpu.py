"""The C library: any number of threads write one thread's bytes, and copies have checksums.

test_reference.py holds every instruction set to the reference.
"""

from __future__ import annotations

import numpy as np
import pytest
from storm_kernels import ancf
from storm_kernels.ancf import DType, Mode, cpu
from storm_kernels.errors import BackendUnavailable
from storm_kernels.native import InstructionSet, available_sets
from support.cuda_on_cpu import Guarded

from .conftest import Codec, normal

available, detail = cpu.probe()
pytestmark = pytest.mark.skipif(not available, reason=f"C library: {detail}")

CODEC = Codec(cpu.CpuCodec())
MODES = ["auto", *(mode.name.lower() for mode in Mode)]


@pytest.mark.parametrize("nbytes", [0, 1, 2047, 2048, 2049, 9_000_001])
def test_checksum_while_copying(nbytes):
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    expected = ancf.checksum.checksum(data)
    address = data.ctypes.data
    for one in available_sets():
        for offset in (0, 5):
            copy = Guarded(nbytes, offset)
            found = cpu.library().storm_ancf_copy_checksum(copy.address, address, nbytes, one)
            copy.check()
            assert (copy.data == data).all()
            assert found == expected == cpu.library().storm_ancf_checksum(address, nbytes, one)
    for backend in ("cpu", "numpy"):
        again = np.zeros_like(data)
        copied = ancf.host_backend(backend).copy_checksum(address, again.ctypes.data, nbytes)
        assert copied == expected
        assert (again == data).all()


@pytest.mark.parametrize("mode", MODES)
def test_threads_do_not_show_in_the_bytes(mode):
    """Large enough for several ranges of tiles, the last of them not whole."""
    for zeros in (0.0, 0.5):
        data = normal(4096 * 200 + 77, DType.BFLOAT16, zeros)
        alone = CODEC.encode(data, DType.BFLOAT16, mode=mode)
        for threads in (2, 3, 64):
            blob = CODEC.encode(data, DType.BFLOAT16, mode=mode, threads=threads)
            assert blob.tobytes() == alone.tobytes(), (zeros, threads)
            assert (CODEC.decode(blob, data.size, threads=threads) == data).all()


@pytest.mark.parametrize("mode", ["window", "sparse", "values", "auto"])
@pytest.mark.parametrize("silent", [(0,), (0, 1), (1, 2), (3,)])
def test_ranges_without_records(silent, mode):
    """Of four threads' ranges of tiles some write no record bytes, the first ones among them."""
    elements = np.zeros((4, 4096 * 64), "<u2")
    noise = normal(elements.size, DType.BFLOAT16, 0.5).view("<u2").reshape(elements.shape)
    for quarter in set(range(4)) - set(silent):
        elements[quarter] = noise[quarter]
    data = elements.reshape(-1).view(np.uint8)
    options = {"mode": mode, "checksum": len(silent) > 1}
    alone = CODEC.encode(data, DType.BFLOAT16, **options)
    for threads in (2, 4):
        blob = CODEC.encode(data, DType.BFLOAT16, threads=threads, **options)
        assert blob.tobytes() == alone.tobytes()


def test_threads_fall_back_to_raw_together():
    """Only the last range of tiles grows beyond what the others save."""
    data = normal(4096 * 256, DType.BFLOAT16, 0.0).copy()
    noise = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    data[data.size // 8 :] = noise[data.size // 8 :]
    for threads in (1, 4):
        blob = CODEC.encode(data, DType.BFLOAT16, mode="window", threads=threads)
        assert ancf.read_header(blob).mode is Mode.RAW
        assert (CODEC.decode(blob, data.size, threads=threads) == data).all()


def test_threads_notice_damage():
    """A changed bit of padding does no harm; every other one is noticed by whichever thread."""
    data = normal(4096 * 256, DType.BFLOAT16, 0.5)
    blob = CODEC.encode(data, DType.BFLOAT16)
    noticed = 0
    for place in np.linspace(300, blob.size - 1, 20).astype(int):
        damaged = blob.copy()
        damaged[place] ^= 4
        try:
            assert (CODEC.decode(damaged, data.size, threads=4) == data).all()
        except ancf.CorruptBlob:
            noticed += 1
    assert noticed >= 15


def test_what_is_missing_is_named():
    data = np.zeros(512, np.uint8)
    with pytest.raises(ancf.UsageError, match="threads=0"):
        CODEC.encode(data, DType.BFLOAT16, threads=0)
    for one in [one for one in InstructionSet if one >= 0 and one not in available_sets()]:
        with pytest.raises(BackendUnavailable, match=one.name.lower()):
            Codec(cpu.CpuCodec(one)).encode(data, DType.BFLOAT16)
