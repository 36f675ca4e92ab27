"""Other GPU codecs on codec_gpu.py's tensors: nvCOMP, DietGPU and SplitZip, each if it is here.

Nothing of theirs is kept in this repository:
- nvCOMP: `pip install nvidia-libnvcomp-cu13`; its batched interface, 64 KiB a chunk as it advises.
- DietGPU (github.com/facebookresearch/dietgpu, checked out to $D), built to a small library:
      nvcc -O3 -std=c++17 -arch=native -shared -Xcompiler -fPIC -I$D -Itests/bench/dietgpu \\
          -DDIETGPU_COMMIT=\\"$(git -C $D rev-parse HEAD)\\" -o libdietgpu_c.so \\
          tests/bench/dietgpu/dietgpu_c.cu $D/dietgpu/ans/GpuANS{Encode,Decode,Info}.cu \\
          $D/dietgpu/float/GpuFloat{Compress,Decompress,Info}.cu $D/dietgpu/utils/*.cpp
- SplitZip (github.com/Intelligent-Microsystems-Lab/SplitZip): its codec_gpu.py and Triton.

What stays true: a peer's decoded bits were compared with the tensor's before a figure is given, and
its memory is allocated beforehand wherever its interface lets us.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from codec_gpu_cases import CASES
from codec_gpu_job import POISON, milliseconds, same_bits

CHUNK = 64 << 10
TEMPORARY_BYTES = 2 << 30  # for DietGPU, which would otherwise allocate while it is timed
NVCOMP_PACKAGE = "nvidia-libnvcomp-cu13"
NVCOMP_TYPES = {"bytes": 1, "float16": 10, "float32": 11}  # of nvcompType_t
NVCOMP_ANY_TYPE = 0xFF
DIETGPU_TYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}  # of dietgpu::FloatType


class Missing(Exception):
    """A peer is not here; the message says what is missing."""


class Session(Protocol):
    """A peer with one tensor's memory. `out` is what the last `decode` made."""

    out: torch.Tensor

    def encode(self) -> object: ...
    def decode(self) -> object: ...
    def encoded_bytes(self) -> int: ...


class Peer(Protocol):
    """A codec that is here."""

    name: str
    version: str

    def session(self, tensor: torch.Tensor) -> Session | None:
        """Return a session for `tensor`, None where the codec is not made for its type."""


def poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor)
    made.view(torch.uint8).fill_(POISON)
    return made


def stream_handle() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class _NvcompOptions(ctypes.Structure):
    """Every option structure of nvCOMP's batched interfaces: 64 bytes, zero by default."""

    _fields_ = (("words", ctypes.c_uint32 * 16),)


class Nvcomp:
    """One of nvCOMP's batched codecs with the elements taken as one of its types."""

    def __init__(self, library: ctypes.CDLL, version: str, codec: str, kind: str) -> None:
        self.name, self.version = f"nvCOMP {codec} as {kind}", version
        self.library, self.codec, self.kind = library, codec, kind
        self.compress_options, self.decompress_options = _NvcompOptions(), _NvcompOptions()
        self.compress_options.words[1] = NVCOMP_TYPES[kind]
        self.decompress_options.words[1] = NVCOMP_ANY_TYPE if codec == "ANS" else 0

    def session(self, tensor: torch.Tensor) -> Session | None:
        width = {"float16": 2, "float32": 4}.get(self.kind)
        if width is not None and (not tensor.is_floating_point() or tensor.itemsize != width):
            return None
        return NvcompSession(self, tensor)

    def call(self, function: str, *arguments: object) -> None:
        result = getattr(self.library, f"nvcompBatched{self.codec}{function}")(*arguments)
        if result:
            raise RuntimeError(f"nvcompBatched{self.codec}{function} failed with {result}")


class NvcompSession:
    """A tensor in chunks, each with room for the largest blob of a chunk."""

    def __init__(self, peer: Nvcomp, tensor: torch.Tensor) -> None:
        self._peer, self.out = peer, poisoned_like(tensor)
        self._count = -(-tensor.nbytes // CHUNK)
        stride = self._ask("CompressGetMaxOutputChunkSize", CHUNK, peer.compress_options)
        stride = -(-stride // 256) * 256
        self._blobs = torch.empty(self._count * stride, dtype=torch.uint8, device="cuda")
        self._starts = self._addresses(tensor, CHUNK)
        self._outs = self._addresses(self.out, CHUNK)
        self._places = self._addresses(self._blobs, stride)
        self._sizes = torch.full((self._count,), CHUNK, dtype=torch.int64, device="cuda")
        self._sizes[-1] = tensor.nbytes - (self._count - 1) * CHUNK
        self._encoded, self._found = torch.zeros_like(self._sizes), torch.zeros_like(self._sizes)
        self._status = torch.full((self._count,), -1, dtype=torch.int32, device="cuda")
        self._temporary = [
            torch.empty(max(1, size), dtype=torch.uint8, device="cuda")
            for size in self._temporary_sizes(tensor.nbytes)
        ]

    def _addresses(self, memory: torch.Tensor, stride: int) -> torch.Tensor:
        steps = torch.arange(self._count, dtype=torch.int64, device="cuda")
        return steps * stride + memory.data_ptr()

    def _ask(self, function: str, *arguments: object) -> int:
        """Call a function whose last argument but those after the options is a size to fill in."""
        size = ctypes.c_size_t()
        words = [ctypes.c_size_t(a) if isinstance(a, int) else a for a in arguments]
        at = next(i for i, word in enumerate(words) if isinstance(word, _NvcompOptions)) + 1
        self._peer.call(function, *words[:at], ctypes.byref(size), *words[at:])
        return size.value

    def _temporary_sizes(self, nbytes: int) -> tuple[int, int]:
        peer, stream = self._peer, stream_handle()
        return (
            self._ask(
                "CompressGetTempSize", self._count, CHUNK, peer.compress_options, nbytes, stream
            ),
            self._ask(
                "DecompressGetTempSize", self._count, CHUNK, peer.decompress_options, nbytes, stream
            ),
        )

    def encode(self) -> None:
        temporary = self._temporary[0]
        self._peer.call(
            "CompressAsync", _at(self._starts), _at(self._sizes), ctypes.c_size_t(CHUNK),
            ctypes.c_size_t(self._count), _at(temporary), ctypes.c_size_t(temporary.numel()),
            _at(self._places), _at(self._encoded), self._peer.compress_options, _at(self._status),
            stream_handle(),
        )  # fmt: skip

    def decode(self) -> None:
        temporary = self._temporary[1]
        self._peer.call(
            "DecompressAsync", _at(self._places), _at(self._encoded), _at(self._sizes),
            _at(self._found), ctypes.c_size_t(self._count), _at(temporary),
            ctypes.c_size_t(temporary.numel()), _at(self._outs), self._peer.decompress_options,
            _at(self._status), stream_handle(),
        )  # fmt: skip

    def encoded_bytes(self) -> int:
        return int(self._encoded.sum())


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def nvcomp_peers() -> list[Nvcomp]:
    """nvCOMP's entropy coder, and its coder of small numbers and zeros, for each element type."""
    try:
        version = importlib.metadata.version(NVCOMP_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"not installed: pip install {NVCOMP_PACKAGE}") from None
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for path in Path(place).glob("libnvcomp/lib64/libnvcomp.so.*"):
            library = ctypes.CDLL(str(path))
            kinds = [("ANS", kind) for kind in NVCOMP_TYPES] + [
                ("Bitcomp", kind) for kind in NVCOMP_TYPES
            ]
            return [Nvcomp(library, version, codec, kind) for codec, kind in kinds]
    raise Missing(f"{NVCOMP_PACKAGE} {version} is installed without libnvcomp.so")


class DietGpu:
    """DietGPU's float codec."""

    name = "DietGPU"

    def __init__(self, path: Path | None) -> None:
        if path is None:
            raise Missing("no library: build it as codec_gpu_peers.py says and pass --dietgpu")
        self.library = ctypes.CDLL(str(path.resolve()))
        self.library.bench_dietgpu_commit.restype = ctypes.c_char_p
        self.library.bench_dietgpu_memory.restype = ctypes.c_void_p
        self.version = self.library.bench_dietgpu_commit().decode()

    def session(self, tensor: torch.Tensor) -> Session | None:
        return DietGpuSession(self, tensor) if tensor.dtype in DIETGPU_TYPES else None


class DietGpuSession:
    """A tensor as a batch of one, with temporary memory."""

    def __init__(self, peer: DietGpu, tensor: torch.Tensor) -> None:
        self._library, self._tensor, self.out = peer.library, tensor, poisoned_like(tensor)
        self._type = ctypes.c_uint32(DIETGPU_TYPES[tensor.dtype])
        self._count = ctypes.c_uint32(tensor.numel())
        bound = self._library.bench_dietgpu_bound(self._type, self._count) & 0xFFFFFFFF
        self._blob = torch.empty(bound, dtype=torch.uint8, device="cuda")
        self._size, self._found = (
            torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2)
        )
        self._success = torch.zeros(1, dtype=torch.uint8, device="cuda")
        self._memory = torch.empty(TEMPORARY_BYTES, dtype=torch.uint8, device="cuda")
        self._stack = ctypes.c_void_p(
            self._library.bench_dietgpu_memory(
                tensor.get_device(), _at(self._memory), ctypes.c_size_t(TEMPORARY_BYTES)
            )
        )
        weakref.finalize(self, self._library.bench_dietgpu_forget, self._stack)

    def encode(self) -> None:
        self._library.bench_dietgpu_encode(
            self._stack, self._type, _at(self._tensor), self._count, _at(self._blob),
            _at(self._size), stream_handle(),
        )  # fmt: skip

    def decode(self) -> None:
        self._library.bench_dietgpu_decode(
            self._stack, self._type, _at(self._blob), _at(self.out), self._count,
            _at(self._success), _at(self._found), stream_handle(),
        )  # fmt: skip

    def encoded_bytes(self) -> int:
        return int(self._size)


class SplitZip:
    """SplitZip, its code book made from the tensor itself before; its encoder waits for the GPU."""

    name = "SplitZip"

    def __init__(self, path: Path | None) -> None:
        if path is None:
            raise Missing("no source: pass --splitzip with the path of its codec_gpu.py")
        self.version = f"codec_gpu.py sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
        self._module = _load(path, "splitzip_codec_gpu")

    def session(self, tensor: torch.Tensor) -> Session | None:
        return SplitZipSession(self._module, tensor) if tensor.dtype is torch.bfloat16 else None


class SplitZipSession:
    """A tensor and SplitZip's codec for it, which allocates what it returns."""

    def __init__(self, module: ModuleType, tensor: torch.Tensor) -> None:
        self._codec = module.ChunkLocalSplitZipGPU(device="cuda")
        self._codec.calibrate(tensor)
        self._tensor, self.out = tensor, tensor

    def encode(self) -> None:
        self._blob = self._codec.encode(self._tensor)

    def decode(self) -> None:
        self.out = self._codec.decode(self._blob)

    def encoded_bytes(self) -> int:
        return int(self._blob.compressed_bytes)


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Missing(f"{path} is no Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def peers_here(dietgpu: Path | None, splitzip: Path | None) -> tuple[list[Peer], list[dict]]:
    """Return the peers that can run, and a row with the reason for each that cannot."""
    found: list[Peer] = []
    missing = []
    ways = {
        "nvCOMP": nvcomp_peers,
        "DietGPU": lambda: [DietGpu(dietgpu)],
        "SplitZip": lambda: [SplitZip(splitzip)],
    }
    for name, make in ways.items():
        try:
            found += make()
        except (Missing, OSError, ImportError) as error:
            missing.append({"peer": name, "skipped": str(error)})
            print(f"{name}: skipped, {error}", flush=True)
    return found, missing


def measure_peer(peer: Peer, tensor: torch.Tensor, repeat: int) -> dict | None:
    """Return one row's figures, None where the peer does not take such a tensor."""
    session = peer.session(tensor)
    if session is None:
        return None
    session.encode()
    session.decode()
    size, same = session.encoded_bytes(), same_bits(session.out, tensor)
    if not same:
        return {"failed": "the decoded bits differ"}
    megabytes = tensor.nbytes / 1e6  # GB/s times milliseconds
    return {
        "ratio": round(tensor.nbytes / size, 4),
        "encode_gbps": round(megabytes / milliseconds(session.encode, repeat), 1),
        "decode_gbps": round(megabytes / milliseconds(session.decode, repeat), 1),
    }


def rows_of(peers: list[Peer], tensor: torch.Tensor, name: str, repeat: int) -> Iterator[dict]:
    """Measure each of the peers on one tensor."""
    for peer in peers:
        row = {"peer": peer.name, "version": peer.version, "tensor": name}
        try:
            figures = measure_peer(peer, tensor, repeat)
        except RuntimeError as error:
            figures = {"failed": str(error)}
        if figures is None:
            continue
        shown = figures.get(
            "failed"
        ) or "ratio {ratio:7.3f}  encode {encode_gbps:6.0f}  decode {decode_gbps:6.0f} GB/s".format(
            **figures
        )
        print(f"{name:26} {peer.name:24} {shown}", flush=True)
        yield row | figures


def peer_table(nbytes: int, repeat: int, dietgpu: Path | None, splitzip: Path | None) -> list[dict]:
    """Return the rows of every peer on every tensor of the cases."""
    peers, rows = peers_here(dietgpu, splitzip)
    tensors = {case.tensor: case.make for case in CASES}
    for name, make in tensors.items():
        rows += rows_of(peers, make(nbytes), name, repeat)
        torch.cuda.empty_cache()
    return rows
