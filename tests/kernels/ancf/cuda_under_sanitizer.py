"""Everything the CUDA codec does with memory, small, for compute-sanitizer to watch.

    compute-sanitizer --report-api-errors no python tests/kernels/ancf/cuda_under_sanitizer.py
    (also --tool racecheck, --tool synccheck; --brief leaves out sizes and damage. What libraries
    ask the driver for and do not get is no error of the kernels.)

Each buffer is an allocation of its own, of just the bytes that the codec may touch, so that a step
outside is an error of the tool's. What stays true: the blobs are the reference's and the decoded
bits the original ones, or the status says why not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import cupy
import numpy as np
from storm_kernels.ancf import DType, Mode, max_encoded_bytes, reference
from storm_kernels.ancf.checksum import checksum, from_sums
from storm_kernels.ancf.cuda import CudaCodec

COUNTS = (1, 31, 33, 1023, 1025, 4095, 4097, 12_289)
OFFSETS = (0, 1, 2, 8)  # bytes from an address that is aligned to 16
DAMAGED = 40
BRIEF_COUNT = 9_001  # elements: two whole tiles and part of a third


class Buffer:
    """Device memory of exactly `nbytes` after `offset` bytes that nobody may count on."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self._memory = cupy.cuda.memory.Memory(max(1, nbytes + offset))
        self.address, self.nbytes = self._memory.ptr + offset, nbytes

    @classmethod
    def of(cls, data: np.ndarray, offset: int = 0) -> Buffer:
        made = cls(data.size, offset)
        if data.size:
            cupy.cuda.runtime.memcpy(made.address, data.ctypes.data, data.size, 1)
        return made

    def read(self, count: int) -> np.ndarray:
        data = np.empty(count, np.uint8)
        if count:
            cupy.cuda.runtime.memcpy(data.ctypes.data, self.address, count, 2)
        return data


class Checked:
    """A codec whose every call is compared with the reference."""

    def __init__(self) -> None:
        self._codec = CudaCodec()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.calls = 0

    def round_trip(
        self, data: np.ndarray, dtype: DType, offset: int = 0, **options: str
    ) -> np.ndarray:
        blob = self._encode(data, dtype, offset, **options)
        expected = reference.encode(data, dtype, **options)
        if blob.tobytes() != expected.tobytes():
            sys.exit(f"another blob: {dtype.name}, {data.size} bytes, {options}")
        if self._checksum(data, offset) != checksum(data):
            sys.exit(f"another checksum: {data.size} bytes at {offset}")
        status, same = self.decode(blob, data.size, dtype, offset)
        if status or not (same == data).all():
            sys.exit(f"other bits: {dtype.name}, {data.size} bytes, {options}, status {status}")
        return blob

    def _encode(self, data: np.ndarray, dtype: DType, offset: int, **options: str) -> np.ndarray:
        source, target = Buffer.of(data, offset), Buffer(max_encoded_bytes(data.size, dtype))
        scratch, result = Buffer(self._codec.scratch_bytes(data.size, dtype)), Buffer(24)
        self._codec.encode_async(
            source.address, data.size, dtype, target.address, target.nbytes, scratch.address,
            result.address, self._stream.ptr, **options,
        )  # fmt: skip
        self._finish()
        return target.read(int(result.read(24).view(np.uint64)[0]))

    def _checksum(self, data: np.ndarray, offset: int) -> int:
        source, sums = Buffer.of(data, offset), Buffer(8 * self._codec.check_blocks)
        span = Buffer.of(np.array([source.address, data.size], np.uint64).view(np.uint8))
        self._codec.check_async(span.address, 1, sums.address, self._stream.ptr)
        self._finish()
        return from_sums(sums.read(sums.nbytes).view(np.uint64).tolist(), data.size)

    def decode(
        self, blob: np.ndarray, nbytes: int, dtype: DType, offset: int = 0
    ) -> tuple[int, np.ndarray]:
        source, target = Buffer.of(blob), Buffer(nbytes, offset)
        scratch, status = Buffer(self._codec.scratch_bytes(nbytes, dtype)), Buffer(8)
        self._codec.decode_async(
            source.address, blob.size, target.address, nbytes, scratch.address, status.address,
            self._stream.ptr, dtype=dtype,
        )  # fmt: skip
        self._finish()
        return int(status.read(8).view(np.uint64)[0]), target.read(nbytes)

    def _finish(self) -> None:
        self._stream.synchronize()
        self.calls += 1


def tensors(count: int, dtype: DType) -> Iterator[np.ndarray]:
    """Bell-shaped, with zeros, in few values, and random bits."""
    rng = np.random.default_rng(count)
    wide = (rng.standard_normal(count).astype(np.float32).view(np.uint32)).astype(np.uint64) << 32
    elements = (wide >> (64 - dtype.width)).astype(f"<u{dtype.element_bytes}")
    yield elements.view(np.uint8)
    yield np.where(rng.random(count) < 0.2, elements, 0).astype(elements.dtype).view(np.uint8)
    yield (rng.integers(0, 2, count) * 7).astype(elements.dtype).view(np.uint8)
    yield rng.integers(0, 256, count * dtype.element_bytes, dtype=np.uint8)


def modes(checked: Checked) -> None:
    """Every mode on every kind of tensor, at both speeds."""
    for dtype in (DType.BFLOAT16, DType.FLOAT32):
        for data in tensors(BRIEF_COUNT, dtype):
            for speed in ("fast", "dense"):
                checked.round_trip(data, dtype, speed=speed)
                for mode in Mode:
                    checked.round_trip(data, dtype, speed=speed, mode=mode.name.lower())


def sizes(checked: Checked) -> None:
    """Tensors that end within a tile, at addresses that are aligned to nothing."""
    for count in COUNTS:
        for offset in OFFSETS:
            for data in tensors(count, DType.BFLOAT16):
                checked.round_trip(data, DType.BFLOAT16, offset)


def damage(checked: Checked) -> None:
    """Blobs with flipped bits or their end missing: any status, but no step outside."""
    rng = np.random.default_rng(3)
    for mode in ("window", "sparse", "values", "integer", "boolean", "raw"):
        data = list(tensors(BRIEF_COUNT, DType.BFLOAT16))[1]
        blob = reference.encode(data, DType.BFLOAT16, mode=mode, speed="dense", checksum=False)
        for _ in range(DAMAGED):
            damaged = blob.copy()
            for place in rng.integers(256, blob.size, 1 + rng.integers(3)):
                damaged[place] ^= 1 << rng.integers(8)
            cut = int(rng.integers(0, blob.size)) if rng.random() < 0.2 else blob.size
            checked.decode(damaged[:cut], data.size, DType.BFLOAT16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--brief", action="store_true", help="every mode alone")
    options = parser.parse_args()
    checked = Checked()
    modes(checked)
    if not options.brief:
        sizes(checked)
        damage(checked)
    print(f"{checked.calls} calls checked")


if __name__ == "__main__":
    main()
