"""Selects the kernels that a call of the CUDA codec launches, and their grids, without a device.

The device chooses a tensor's plan, and the host does not wait for the choice. So it launches
kernels for all plans that the arguments permit, and one of them executes the chosen plan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from ..errors import CorruptBlob
from .dtypes import DType
from .layout import TILE, Mode
from .options import POLICIES, parse_mode
from .plan import max_encoded_bytes

__all__ = [
    "ALL_PIPELINES",
    "BEGIN_THREADS",
    "BLOCK_THREADS",
    "CHECK_ARGUMENTS",
    "DECODE_ARGUMENTS",
    "ENCODE_ARGUMENTS",
    "ENCODE_WARPS",
    "KIND_BYTES",
    "PIPELINES",
    "PLAN_BYTES",
    "TAKEN",
    "BlobKind",
    "Encoding",
    "Launch",
    "blob_kind",
    "decode_kernels",
    "decoding",
    "encode_kernels",
    "encoding",
    "pipeline_of",
    "scratch_bytes",
]

BLOCK_THREADS: Final = 512
WARP_THREADS: Final = 32
ENCODE_WARPS: Final = {
    "ancf_encode_dense": {1: 12, 2: 12, 4: 8, 8: 7},
    "ancf_encode_bitmap": {1: 16, 2: 11, 4: 6, 8: 2},
}
"""Warps per block by an element's bytes; each warp encodes one tile; as in ancf_encode.cu."""
DECODE_WARPS: Final = 12
FAST_DECODE_WARPS: Final = {1: 16, 2: 16, 4: 12, 8: 12}
"""Warps per block of a decoder, pipeline fast's by an element's bytes; as in ancf_decoding.cuh."""
DECODE_BLOCK_TILES: Final = 3  # tiles that keep a block busy
CHOOSE_THREADS: Final = 1024
BEGIN_THREADS: Final = 32
PLAN_BYTES: Final = 512 + 4096 + 640  # kPlanBytes + kValuesBytes + kWorkBytes of ancf_format.cuh
UNCLEARED_BYTES: Final = 512 + 4096
MAX_UNIT_TILES: Final = 4
AUTO_MODE: Final = 255
ALL_PIPELINES: Final = 255  # kAllPipelines of ancf_encode.cu

PIPELINES: Final = ("whole", "fast", "dense", "bitmap")  # Pipeline of ancf_format.cuh, in its order
ENCODERS: Final = ("fast", "dense", "bitmap", "whole")  # in the order of their launches

_SIZE, _WORD = "Q", "I"  # kinds of arguments: 64 bits (also addresses) and 32 bits
ENCODE_ARGUMENTS: Final = dict.fromkeys(("src", "nbytes", "dst", "scratch", "result"), _SIZE) | (
    dict.fromkeys(("words", "dtype", "mode", "dense", "checksum", "unit_tiles", "policy"), _WORD)
    | {"launched": _WORD}
)
DECODE_ARGUMENTS: Final = dict.fromkeys(
    ("blob", "blob_bytes", "dst", "dst_bytes", "scratch", "status"), _SIZE
)
CHECK_ARGUMENTS: Final = {"spans": _SIZE, "sums": _SIZE, "count": _WORD}
"""All arguments of a call's kernels, by name and kind, in the order in which they are packed."""

_ENCODER = ("src", "dst", "scratch", "result")
_DECODER = ("blob", "dst", "scratch", "status")
TAKEN: Final = {
    "ancf_choose": ("src", "nbytes", "scratch", "words", "dtype", "mode", "dense", "checksum"),
    "ancf_values": ("src", "scratch", "mode", "policy"),
    **{f"ancf_encode_{kind}": (*_ENCODER, "unit_tiles") for kind in ("whole", "fast")},
    **{f"ancf_encode_{kind}": _ENCODER for kind in ("dense", "bitmap")},
    "ancf_encode_raw": (*_ENCODER, "launched"),
    "ancf_check": ("spans", "count", "sums"),
    "ancf_decode_begin": ("blob", "blob_bytes", "dst_bytes", "scratch", "status"),
    **{f"ancf_decode_{kind}": _DECODER for kind in PIPELINES},
}
"""The arguments that each kernel takes, in the order of its parameters."""

KIND_BYTES: Final = 16
"""The first bytes of a header, which `blob_kind` needs."""

_COPY: Final = "ancf_encode_raw"

_MODE_AT, _DTYPE_AT, _SECOND_BITS_AT = 6, 7, 14  # FORMAT.md, section 2


class BlobKind(NamedTuple):
    """The element type and pipeline name that a decoder must be compiled for."""

    dtype: DType
    pipeline: str


class Launch(NamedTuple):
    """A kernel's name, its number of blocks, and the threads per block."""

    kernel: str
    blocks: int
    threads: int


class Encoding(NamedTuple):
    """How to encode a tensor. `room` is the minimum output size in bytes."""

    launches: tuple[Launch, ...]
    room: int
    clear_words: int
    unit_tiles: int
    mode: int
    is_dense: int
    policy: int
    launched: int


def blob_kind(header: bytes) -> BlobKind:
    """Return the blob's kind from the first KIND_BYTES of a header that is not checked yet.

    Raises:
        CorruptBlob: the header's element type does not exist.
    """
    number = header[_DTYPE_AT]
    if number not in DType.__members__.values():
        raise CorruptBlob(f"the blob's header names element type {number}, which does not exist")
    return BlobKind(DType(number), _pipeline(header[_MODE_AT], header[_SECOND_BITS_AT]))


def pipeline_of(mode: str) -> str | None:
    """Return the pipeline that probably encoded a blob of mode `mode` at speed fast.

    Return None for raw and constant, which several pipelines can produce.
    """
    known = {"sparse": "bitmap", "window": "fast", "truncated": "dense"}
    return None if mode in ("raw", "constant") else known.get(mode, "whole")


def _pipeline(mode: int, second_bits: int) -> str:
    """Return the pipeline, as pipeline_of in ancf_format.cuh does."""
    if mode == Mode.SPARSE:
        return "bitmap"
    if mode not in (Mode.WINDOW, Mode.TRUNCATED):
        return "whole"
    return "dense" if second_bits else "fast"


def scratch_bytes(nbytes: int, dtype: DType) -> int:
    """Return the bytes of scratch that one call on `nbytes` original bytes needs."""
    return PLAN_BYTES + 8 * (_tiles(nbytes, dtype) + 1)


@lru_cache(maxsize=4096)
def encoding(  # noqa: PLR0917 (positional, as the cache is quicker so)
    nbytes: int,
    dtype: DType,
    mode: str,
    speed: str,
    policy: str,
    most_blocks: int,
    likely: str | None = None,
) -> Encoding:
    """Return how to encode `nbytes` bytes; raise UsageError for unknown names.

    If `likely` names a pipeline, only that pipeline's encoder is launched.
    """
    asked = parse_mode(mode, speed, policy)
    kernels = _kernels(asked, speed, dtype)
    is_guess = f"ancf_encode_{likely}" in kernels and _COPY in kernels
    if is_guess:
        needed = ("ancf_values", f"ancf_encode_{likely}", _COPY)
        kernels = tuple(kernel for kernel in kernels if kernel in needed)
    tiles, teams = _tiles(nbytes, dtype), _teams(dtype)
    clear_words = (scratch_bytes(nbytes, dtype) - UNCLEARED_BYTES) // 4
    # As few units as keep all teams busy: each unit waits for the end offset of the previous one.
    unit_tiles = max(1, min(MAX_UNIT_TILES, -(-tiles // (most_blocks * teams))))
    blocks = max(1, min(most_blocks, -(-tiles // (teams * unit_tiles))))
    choosing = 2 + min(32, 1 + clear_words // (8 * CHOOSE_THREADS))  # one chooses, the rest clear
    return Encoding(
        launches=(
            Launch("ancf_choose", choosing, CHOOSE_THREADS),
            *(
                _launch_of_warps(kernel, dtype, tiles, most_blocks)
                if kernel in ENCODE_WARPS
                else _launch(kernel, blocks)
                for kernel in kernels
            ),
        ),
        room=max_encoded_bytes(nbytes, dtype),
        clear_words=clear_words,
        unit_tiles=unit_tiles,
        mode=AUTO_MODE if asked is None else int(asked),
        is_dense=int(speed == "dense"),
        policy=POLICIES.index(policy),
        launched=PIPELINES.index(likely) if is_guess and likely else ALL_PIPELINES,
    )


@lru_cache(maxsize=4096)
def decoding(nbytes: int, dtype: DType, pipeline: str, most_blocks: int) -> Launch:
    """Return the launch that decodes blobs of that pipeline to `nbytes` original bytes."""
    warps = FAST_DECODE_WARPS[dtype.element_bytes] if pipeline == "fast" else DECODE_WARPS
    blocks = max(1, min(most_blocks, -(-_tiles(nbytes, dtype) // DECODE_BLOCK_TILES)))
    return Launch(f"ancf_decode_{pipeline}", blocks, warps * WARP_THREADS)


def encode_kernels(dtype: DType, mode: str = "auto", speed: str = "fast") -> tuple[str, ...]:
    """Return the names of the kernels that `encoding` launches for such tensors."""
    return ("ancf_choose", *_kernels(parse_mode(mode, speed), speed, dtype))


def decode_kernels(dtype: DType, mode: str = "auto", speed: str = "fast") -> tuple[str, ...]:
    """Return the names of the kernels that decode the blobs of such tensors."""
    kinds = _encoders(parse_mode(mode, speed), speed, dtype)
    return ("ancf_decode_begin", *(f"ancf_decode_{kind}" for kind in kinds))


def _launch(kernel: str, blocks: int) -> Launch:
    if kernel == "ancf_values":
        return Launch(kernel, 1, CHOOSE_THREADS)
    return Launch(kernel, blocks, BLOCK_THREADS)


def _launch_of_warps(kernel: str, dtype: DType, tiles: int, most_blocks: int) -> Launch:
    warps = ENCODE_WARPS[kernel][dtype.element_bytes]
    return Launch(kernel, max(1, min(most_blocks, -(-tiles // warps))), warps * WARP_THREADS)


def _kernels(asked: Mode | None, speed: str, dtype: DType) -> tuple[str, ...]:
    """Return the kernels after ancf_choose; only the encoder that fits the chosen plan works."""
    values = ("ancf_values",) if asked in (Mode.TERNARY, Mode.VALUES) else ()
    encoders = (f"ancf_encode_{kind}" for kind in _encoders(asked, speed, dtype))
    # The last kernel copies the tensor raw if its encoding turns out too large.
    copy = () if asked is Mode.RAW else (_COPY,)
    return (*values, *encoders, *copy)


def _encoders(asked: Mode | None, speed: str, dtype: DType) -> tuple[str, ...]:
    may_be_fast = speed == "fast" and (asked is None or asked in (Mode.WINDOW, Mode.TRUNCATED))
    may_drop = dtype.is_float and dtype.element_bytes >= 4
    may_be_dense = asked is Mode.TRUNCATED or (
        asked in (None, Mode.WINDOW) and (speed == "dense" or (asked is None and may_drop))
    )
    if asked is None and not dtype.is_float:
        may_be_fast = may_be_dense = False
    may_have_bitmap = asked in (None, Mode.SPARSE, Mode.CONSTANT)
    wanted = (may_be_fast, may_be_dense, may_have_bitmap, True)
    return tuple(kind for kind, may in zip(ENCODERS, wanted, strict=True) if may)


def _tiles(nbytes: int, dtype: DType) -> int:
    return -(-nbytes // dtype.element_bytes // TILE)


def _teams(dtype: DType) -> int:
    """Return the teams per block; a team has 64 threads for each byte of an element."""
    return BLOCK_THREADS // (64 * dtype.element_bytes)
