"""Speed and ratio of the host codecs, as a table and as JSON.

    python tests/bench/codec_cpu.py [--mib 64] [--repeat 7] [--cpu-time] [--json FILE]

One thread unless a row says otherwise; GB/s count original bytes, of the fastest repetition, since
other programs only ever make one slower. With --cpu-time the process's processor time counts, for
machines that are busy; rows of several threads are then left out. Buffers are touched before; so
are those of peers where their interface takes one (zstd, blosc2's decoder), or much of what is
timed would be the kernel handing out pages. Peers are zstd -1, blosc2 and zipnn, each left out with
the reason when its package is missing. What stays true: every timed blob was decoded to the
original bits.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module

import numpy as np
from recording import parser_of, record
from storm_kernels import ancf
from storm_kernels.ancf import DType, reference
from storm_kernels.ancf.cpu import CpuCodec
from storm_kernels.native import available_sets

MIB = 1 << 20
NUMPY_BYTES = 2 * MIB  # the reference is slow; its speed does not depend on the size
Bytes = np.ndarray
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Case:
    """One tensor and how it is coded; `make` returns the bytes of about that many."""

    name: str
    dtype: DType
    make: Callable[[int], Bytes]
    speed: str = "fast"
    mode: str = "auto"
    checksum: bool = True


@dataclass(frozen=True)
class Row:
    """What was measured: GB/s of original bytes."""

    tensor: str
    codec: str
    threads: int
    ratio: float
    encode: float
    decode: float


def normal(nbytes: int, width: int = 16) -> Bytes:
    wide = np.random.default_rng(0).standard_normal(nbytes // (width // 8), np.float32)
    return (wide.view("<u4") >> (32 - width)).astype(f"<u{width // 8}").view(np.uint8)


def normal_fp16(nbytes: int) -> Bytes:
    wide = np.random.default_rng(0).standard_normal(nbytes // 2, np.float32)
    return wide.astype("<f2").view(np.uint8)


def normal_fp32(nbytes: int) -> Bytes:
    return normal(nbytes, 32)


def with_zeros(nbytes: int, share: float) -> Bytes:
    """bfloat16 without signs, of which `share` is +0."""
    elements = normal(nbytes).view("<u2") & 0x7FFF
    elements[np.random.default_rng(1).random(elements.size) < share] = 0
    return elements.view(np.uint8)


def relu(nbytes: int) -> Bytes:
    return with_zeros(nbytes, 0.5)


def mostly_zero(nbytes: int) -> Bytes:
    return with_zeros(nbytes, 0.75)


def masked(nbytes: int) -> Bytes:
    """bfloat16 times a mask: 75% zeros, half of them -0.0."""
    elements = normal(nbytes).view("<u2").copy()
    elements[np.random.default_rng(1).random(elements.size) < 0.75] &= 0x8000
    return elements.view(np.uint8)


def mask(nbytes: int) -> Bytes:
    return (np.random.default_rng(0).random(nbytes) < 0.1).astype(np.uint8)


def bf16_in_fp32(nbytes: int) -> Bytes:
    return (normal(nbytes // 2).view("<u2").astype("<u4") << 16).view(np.uint8)


def token_ids(nbytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 50_000, nbytes // 8).view(np.uint8)


def noise(nbytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


BF16 = DType.BFLOAT16
CASES = [
    Case("bf16 N(0,1) fast", BF16, normal),
    Case("bf16 N(0,1) fast, no checksum", BF16, normal, checksum=False),
    Case("bf16 N(0,1) dense", BF16, normal, "dense"),
    Case("fp16 N(0,1) fast", DType.FLOAT16, normal_fp16),
    Case("fp16 N(0,1) dense", DType.FLOAT16, normal_fp16, "dense"),
    Case("fp32 N(0,1) fast", DType.FLOAT32, normal_fp32),
    Case("fp32 N(0,1) dense", DType.FLOAT32, normal_fp32, "dense"),
    Case("bf16 ReLU, 50% zeros", BF16, relu),
    Case("bf16 no sign, 75% zeros", BF16, mostly_zero),
    Case("bf16 75% zeros of either sign", BF16, masked),
    Case("bool p = 0.1", DType.BOOL, mask),
    Case("fp32 holding bf16", DType.FLOAT32, bf16_in_fp32),
    Case("int64 token ids", DType.INT64, token_ids),
    Case("random bits", BF16, noise),
    Case("raw", BF16, normal, mode="raw"),
    Case("raw, no checksum", BF16, normal, mode="raw", checksum=False),
]


@dataclass(frozen=True)
class Stopwatch:
    """How often to repeat, and by which clock."""

    repeat: int
    clock: Callable[[], float]

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the least time of `action`, after one run that does not count."""
        times = []
        action()
        for _ in range(self.repeat):
            start = self.clock()
            action()
            times.append(self.clock() - start)
        return min(times)


def ours(case: Case, data: Bytes, codec, name: str, threads: int, watch: Stopwatch) -> Row:
    """Measure one of our host backends."""
    blob = np.ones(ancf.max_encoded_bytes(data.size, case.dtype), np.uint8)
    back = np.ones(data.size, np.uint8)
    options = {"mode": case.mode, "speed": case.speed, "checksum": case.checksum}
    more = {"threads": threads} if codec is not reference else {}
    source = (data.ctypes.data, data.size, case.dtype)

    def encode() -> int:
        return codec.encode_into(*source, blob.ctypes.data, blob.size, **options, **more)

    size = encode()
    encoding = watch.seconds(encode)
    decoding = watch.seconds(
        lambda: codec.decode_into(blob.ctypes.data, size, back.ctypes.data, back.size, **more)
    )
    assert (back == data).all(), f"{name} did not give {case.name} back"
    return row(case.name, name, threads, data.size, size, encoding, decoding)


def row(tensor, codec, threads, nbytes, size, encoding, decoding) -> Row:
    rates = (nbytes / encoding / 1e9, nbytes / decoding / 1e9)
    return Row(tensor, codec, threads, round(nbytes / size, 3), *(round(r, 2) for r in rates))


def all_of_ours(data: dict[str, Bytes], watch: Stopwatch) -> Iterator[Row]:
    """Yield every case on every instruction set; the first case also on NumPy and all cores."""
    for case in CASES:
        for one in available_sets():
            yield ours(case, data[case.name], CpuCodec(one), one.name.lower(), 1, watch)
    small = data[CASES[0].name][:NUMPY_BYTES].copy()
    yield ours(CASES[0], small, reference, "numpy", 1, watch)


def all_cores(data: dict[str, Bytes], watch: Stopwatch) -> Iterator[Row]:
    cores, best = os.cpu_count() or 1, available_sets()[-1]
    for case in CASES[:3]:
        yield ours(case, data[case.name], CpuCodec(best), best.name.lower(), cores, watch)


@dataclass(frozen=True)
class Peer:
    """A peer with a tensor: its blob, and what is timed. `decode` returns the original bytes."""

    packed: bytes
    encode: Callable[[], object]
    decode: Callable[[], Buffer]


class Nowhere(io.RawIOBase):
    """Takes what is written and forgets it, so that a compressor's own buffer is all it needs."""

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        return memoryview(data).nbytes


def zstd(original: bytes) -> Peer:
    module = import_module("zstandard")
    compressor = module.ZstdCompressor(level=1)
    packed = compressor.compress(original)
    back = bytearray(len(original))

    def encode() -> None:
        with compressor.stream_writer(Nowhere(), size=len(original)) as writer:
            writer.write(original)

    def decode() -> Buffer:
        reader, done = module.ZstdDecompressor().stream_reader(packed), 0
        while count := reader.readinto(memoryview(back)[done:]):
            done += count
        return back

    return Peer(packed, encode, decode)


def blosc2(original: bytes) -> Peer:
    module = import_module("blosc2")
    module.set_nthreads(1)
    back = bytearray(len(original))

    def encode() -> bytes:
        return module.compress2(original, typesize=2, clevel=1, codec=module.Codec.ZSTD)

    def decode() -> Buffer:
        module.decompress2(packed, dst=back)
        return back

    packed = encode()
    return Peer(packed, encode, decode)


def zipnn(original: bytes) -> Peer:
    coder = import_module("zipnn").ZipNN(bytearray_dtype="bfloat16", threads=1)

    def encode() -> bytes:
        return coder.compress(bytearray(original))  # a copy: it reorders its input's bytes in place

    packed = encode()
    return Peer(packed, encode, lambda: coder.decompress(packed))


def peers(data: Bytes, watch: Stopwatch) -> Iterator[Row | str]:
    """Yield a row for each peer on the first case, or why it was left out."""
    original = data.tobytes()
    for name, make in {"zstd -1": zstd, "blosc2 zstd -1": blosc2, "zipnn": zipnn}.items():
        try:
            peer = make(original)
        except ImportError as missing:
            yield f"{name} was left out: {missing}"
            continue
        assert peer.decode() == original, f"{name} did not give the tensor back"
        sizes = (len(original), len(peer.packed))
        times = (watch.seconds(peer.encode), watch.seconds(peer.decode))
        yield row(CASES[0].name, name, 1, *sizes, *times)


def memcpy(data: Bytes, watch: Stopwatch) -> Iterator[Row]:
    copy = np.ones_like(data)
    spent = watch.seconds(lambda: np.copyto(copy, data))
    yield row(CASES[0].name, "memcpy", 1, data.size, data.size, spent, spent)


def show(row: Row | str) -> None:
    if isinstance(row, str):
        print(row, flush=True)
        return
    print(
        f"{row.tensor:32}{row.codec:16}{row.threads:3}{row.ratio:8.3f}"
        f"{row.encode:9.2f}{row.decode:9.2f}",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of each tensor")
    parser.add_argument("--repeat", type=int, default=7, help="repetitions of each measurement")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, not wall")
    arguments = parser.parse_args()
    # The process's, not the thread's: zipnn decodes in threads of its own.
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    watch = Stopwatch(arguments.repeat, clock)
    data = {case.name: case.make(arguments.mib * MIB) for case in CASES}
    first = data[CASES[0].name]
    measured = [memcpy(first, watch), peers(first, watch), all_of_ours(data, watch)]
    if not arguments.cpu_time:
        measured.append(all_cores(data, watch))
    print(f"{'tensor':32}{'codec':16}thr   ratio   encode   decode  GB/s")
    rows: list[Row | str] = []
    for part in measured:
        for one in part:
            show(one)
            rows.append(one)
    figures = {
        "mib": arguments.mib,
        "clock": "processor" if arguments.cpu_time else "wall",
        "rows": [asdict(one) for one in rows if isinstance(one, Row)],
        "left_out": [one for one in rows if isinstance(one, str)],
    }
    record(arguments.json, figures, "zstandard", "blosc2", "zipnn")


if __name__ == "__main__":
    main()
