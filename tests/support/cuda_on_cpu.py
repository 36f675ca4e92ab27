"""The CUDA kernels of ANCF as functions on the CPU, between guard bytes, for the tests.

tests/kernels/cuda_on_cpu makes every CUDA thread a fibre and every barrier a real one. What stays
true: a call checks the bytes around each buffer that a kernel was given.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from storm_kernels import ancf
from storm_kernels.ancf import DType
from storm_kernels.ancf.cuda_launches import ALL_PIPELINES, PIPELINES
from storm_kernels.ancf.layout import Mode
from storm_kernels.ancf.options import POLICIES
from support.fenced_memory import Fenced

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kernels/storm_kernels/ancf/csrc/cuda"
HOST = ROOT / "tests/kernels/cuda_on_cpu"
BUILD_SECONDS = 300
GUARD = 64
POISON = 0xA5
AUTO = 255
TRAPS = ("-fsanitize=alignment,shift-exponent", "-fsanitize-undefined-trap-on-error")
"""An access that its type's alignment forbids on a device, or a shift by a word's bits or more,
which a device takes otherwise, ends the process by a signal."""
OK, BAD_HEADER, BAD_RECORD, BAD_CHECKSUM, NOT_DECODED = range(5)


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

    def __init__(self, library: Path, memory: type[Guarded] | type[Fenced] = Guarded) -> None:
        self._memory = memory
        self._library = ctypes.CDLL(str(library))
        self._library.scratch_bytes.restype = ctypes.c_uint64

    def mix_warps(self, seed: int) -> None:
        """Let warps run in another order, and far apart; 0: each in turn."""
        self._library.mix_warps(ctypes.c_uint64(seed))

    def encode_warps(self, pipeline: int) -> int:
        """How many warps an encoder's block has."""
        return int(self._library.encode_warps(pipeline))

    def decode_warps(self, pipeline: int) -> int:
        """How many warps a decoder's block has."""
        return int(self._library.decode_warps(pipeline))

    def _scratch(self, nbytes: int) -> Guarded | Fenced:
        return self._memory(self._library.scratch_bytes(ctypes.c_uint64(nbytes)))

    def encode(
        self, data: np.ndarray, dtype: DType, *, mode: str = "auto", speed: str = "fast",
        checksum: bool = True, policy: str = "adaptive", blocks: int = 1, unit_tiles: int = 2,
        offset: int = 0, likely: str | None = None,
    ) -> np.ndarray:  # fmt: skip
        source = self._memory(data.size, offset)
        target = self._memory(ancf.max_encoded_bytes(data.size, dtype))
        source.data[:] = data
        scratch, result = self._scratch(data.size), self._memory(24)
        number = AUTO if mode == "auto" else int(Mode[mode.upper()])
        failed = self._library.encode(
            source.address, ctypes.c_uint64(data.size), target.address, scratch.address,
            result.address, int(dtype), number, int(speed == "dense"), int(checksum),
            POLICIES.index(policy), blocks, unit_tiles,
            ALL_PIPELINES if likely is None else PIPELINES.index(likely),
        )  # fmt: skip
        assert not failed, "threads wait for each other for ever"
        for buffer in (source, target, scratch, result):
            buffer.check()
        size, status, _ = result.data.view(np.uint64).tolist()
        assert status == OK
        return target.data[:size].copy()

    def check(
        self, parts: Sequence[np.ndarray], *, blocks: int = 1, offset: int = 0
    ) -> list[np.ndarray]:
        """Return of each part what the blocks have of its checksum."""
        sources = [self._memory(part.size, offset) for part in parts]
        for source, part in zip(sources, parts, strict=True):
            source.data[:] = part
        spans, sums = self._memory(16 * len(parts)), self._memory(8 * blocks * len(parts))
        spans.data.view(np.uint64)[:] = [
            word for one in sources for word in (one.address.value, one.data.size)
        ]
        failed = self._library.check(spans.address, len(parts), sums.address, blocks)
        assert not failed, "threads wait for each other for ever"
        for buffer in (*sources, spans, sums):
            buffer.check()
        for source, part in zip(sources, parts, strict=True):
            assert (source.data == part).all(), "a source was changed"
        return list(sums.data.view(np.uint64).reshape(len(parts), blocks).copy())

    def decode(self, blob: np.ndarray, nbytes: int, *, blocks: int = 1, offset: int = 0):
        source, target = self._memory(blob.size), self._memory(nbytes, offset)
        source.data[:] = blob
        scratch, status = self._scratch(nbytes), self._memory(8)
        failed = self._library.decode(
            source.address, ctypes.c_uint64(blob.size), target.address, ctypes.c_uint64(nbytes),
            scratch.address, status.address, blocks,
        )  # fmt: skip
        assert not failed, "threads wait for each other for ever"
        for buffer in (source, target, scratch, status):
            buffer.check()
        return int(status.data.view(np.uint64)[0]), target.data.copy()


def build_kernels(
    folder: Path, dtype: DType, memory: type[Guarded] | type[Fenced] = Guarded
) -> Kernels:
    """Compile the kernels for elements like `dtype`'s into `folder` (g++ is needed).

    What another process has built there is used.
    """
    width, mantissa = dtype.element_bytes, dtype.mantissa_bits
    library = folder / f"kernels_{width}_{mantissa}.so"
    kind = (f"-DANCF_WIDTH={width}", f"-DANCF_MANTISSA={mantissa}")
    with FileLock(library.with_suffix(".lock"), timeout=BUILD_SECONDS):
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            compile_library(HOST / "run_kernels.cpp", unfinished, (*TRAPS, *kind))
            unfinished.rename(library)
    return Kernels(library, memory)


def compile_library(source: Path, library: Path, flags: Sequence[str] = ()) -> None:
    """Compile a source whose `ancf_device.cuh` is the CPU's (g++ is needed)."""
    subprocess.run(
        ["g++", "-std=c++17", "-Og", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", *flags,
         f"-I{HOST}", f"-I{SOURCES}", "-o", library, source],
        check=True, timeout=BUILD_SECONDS,
    )  # fmt: skip
