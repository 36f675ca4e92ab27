"""Fixtures of the codec's tests: every backend of this machine, and buffers with guard bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storm_kernels import ancf, backends
from storm_kernels.ancf import cpu
from storm_kernels.native import available_sets
from support.cuda_on_cpu import Guarded, Kernels, build_kernels


@pytest.fixture(params=["numpy", "cpu"])
def name(request: pytest.FixtureRequest) -> str:
    """The name of a backend for host memory."""
    info = backends()[request.param]
    if not info.available:
        pytest.skip(f"backend {info.name}: {info.detail}")
    return info.name


class Codec:
    """A host backend, called on guarded and possibly misaligned buffers."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, data: np.ndarray, dtype: ancf.DType, offset: int = 0, **options) -> np.ndarray:
        source = Guarded(data.size, offset)
        source.data[:] = data
        target = Guarded(ancf.max_encoded_bytes(data.size, dtype), offset)
        size = self._backend.encode_into(
            source.address.value,
            data.size,
            dtype,
            target.address.value,
            target.data.size,
            **options,
        )
        assert (source.data == data).all(), "the source was changed"
        source.check()
        target.check()
        return target.data[:size].copy()

    def decode(self, blob: np.ndarray, nbytes: int, offset: int = 0, **options) -> np.ndarray:
        source = Guarded(blob.size, offset)
        source.data[:] = blob
        target = Guarded(nbytes, offset)
        try:
            self._backend.decode_into(
                source.address.value, blob.size, target.address.value, nbytes, **options
            )
        finally:
            target.check()
        return target.data.copy()


REFERENCE = Codec(ancf.host_backend("numpy"))
CODECS = {"numpy": REFERENCE}
"""Every host backend here: the reference, and the C library with each instruction set."""
if cpu.probe()[0]:
    CODECS |= {one.name.lower(): Codec(cpu.CpuCodec(one)) for one in available_sets()}


def normal(count: int, dtype: ancf.DType, zeros: float = 0.0) -> np.ndarray:
    """Return N(0,1) elements as bytes, some of them +0: floats, or the high bits of wider ones."""
    rng = np.random.default_rng(count)
    values = rng.standard_normal(count)
    values[rng.random(count) < zeros] = 0.0
    if dtype.element_bytes == 8:
        return values.view(np.uint8)
    if dtype is ancf.DType.FLOAT16:
        return values.astype("<f2").view(np.uint8)
    wide = values.astype("<f4").view("<u4") >> (32 - dtype.width)
    return wide.astype(f"<u{dtype.element_bytes}").view(np.uint8)


def round_trip(data: np.ndarray, dtype: ancf.DType, offset: int = 0, **options) -> np.ndarray:
    """Return the blob that every backend makes, and that each decodes to the same bits."""
    expected = REFERENCE.encode(data, dtype, offset, **options)
    for name, codec in CODECS.items():
        case = f"{name}: {dtype.name}, {data.size} bytes at {offset}, {options}"
        if codec is not REFERENCE:
            blob = codec.encode(data, dtype, offset, **options)
            assert blob.tobytes() == expected.tobytes(), f"another blob, {case}"
        assert (codec.decode(expected, data.size, offset) == data).all(), f"other bits, {case}"
    return expected


@pytest.fixture(scope="session")
def cuda_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers build the CUDA kernels for the CPU into."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler (g++) here")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_on_cpu"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def kernels(cuda_on_cpu: Path) -> Callable[[ancf.DType], Kernels]:
    """The CUDA kernels for elements of a type, on the CPU; built at first use, by one worker."""
    built: dict[tuple[int, int], Kernels] = {}

    def build(dtype: ancf.DType) -> Kernels:
        kind = (dtype.element_bytes, dtype.mantissa_bits)
        if kind not in built:
            built[kind] = build_kernels(cuda_on_cpu, dtype)
        return built[kind]

    return build
