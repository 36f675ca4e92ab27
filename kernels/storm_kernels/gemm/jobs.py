"""The memory layout of the kernels' arguments, and the sizes of their grids; needs no GPU.

The structures match those of csrc/cuda field for field. tests/kernels/gemm uses them to run the
kernels' per-element code on a CPU.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Final

from ..ancf.dtypes import DType
from .window import CHUNK, SLOT_BYTES, geometry, header

__all__ = [
    "ACTIVATIONS",
    "BACKWARD_SHARED_BYTES",
    "BACKWARD_THREADS",
    "PANEL_COLUMNS",
    "PRODUCT_SHARED_BYTES",
    "PRODUCT_THREADS",
    "RECORDS_SHARED_BYTES",
    "RECORD_THREADS",
    "STEP",
    "Backward",
    "Blob",
    "Coding",
    "EncodedBlob",
    "Job",
    "Records",
    "Variant",
    "backward_blocks",
    "product_blocks",
    "records",
    "slot_bytes",
]

ACTIVATIONS: Final = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
"""Activation numbers by name, as in gemm_activation.cuh."""

STEP: Final = 64  # kStep: products per stage of the ring
PANEL_COLUMNS: Final = 128  # kPanelColumns
TILE_ROWS: Final = 128  # kTileRows
PRODUCT_THREADS: Final = 384  # kThreads
PRODUCT_SHARED_BYTES: Final = 1024 + 4 * 48 * 1024 + 8 * 4096 + 80  # kSharedBytes
RECORD_THREADS: Final = 256  # kRecordThreads
RECORDS_SHARED_BYTES: Final = 4 * (8 + 2 * RECORD_THREADS)  # RecordsShared
RECORD_BLOCKS_A_PROCESSOR: Final = 4
BACKWARD_THREADS: Final = 256  # kBackwardThreads
BACKWARD_SHARED_BYTES: Final = BACKWARD_THREADS * 64  # kBackwardShared

_HEADER_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Variant:
    """The compile-time parameters of a module.

    `pairs`: two products that an activation combines, else one product. The blocks of a `cluster`
    share their reads of the weights.
    """

    dtype: DType
    pairs: bool
    encodes: bool
    activation: str = "none"
    bias: bool = False
    cluster: int = 2

    def defines(self) -> dict[str, int]:
        """Return gemm.cu's macros."""
        return {
            "GEMM_HALF": int(self.dtype is DType.FLOAT16),
            "GEMM_PAIRS": int(self.pairs),
            "GEMM_ENCODES": int(self.encodes),
            "GEMM_ACTIVATION": ACTIVATIONS[self.activation],
            "GEMM_BIAS": int(self.bias),
            "GEMM_CLUSTER": self.cluster,
        }


class Coding(ctypes.Structure):
    """The addresses to which a panel's elements are encoded."""

    _fields_ = [
        ("fixed", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("escapes", ctypes.c_uint64),
        ("base", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


class Job(ctypes.Structure):
    """The arguments of a product: its outputs, sizes and schedule."""

    _fields_ = [
        ("out", ctypes.c_uint64),
        ("bias", ctypes.c_uint64 * 2),
        ("codings", Coding * 2),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("steps", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("lead", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


class Blob(ctypes.Structure):
    """A blob whose fixed blocks and escapes are already written."""

    _fields_ = [
        ("bytes", ctypes.c_uint64),
        ("room", ctypes.c_uint64),
        ("slots", ctypes.c_uint64),
        ("escapes", ctypes.c_uint64),
        ("result", ctypes.c_uint64),
        ("base", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


class Records(ctypes.Structure):
    """The arguments for completing up to two blobs."""

    _fields_ = [
        ("blobs", Blob * 2),
        ("elements", ctypes.c_uint64),
        ("payload_offset", ctypes.c_uint64),
        ("tiles", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("header", ctypes.c_uint64 * (_HEADER_BYTES // 8)),
    ]


class EncodedBlob(ctypes.Structure):
    """A blob to decode."""

    _fields_ = [
        ("bytes", ctypes.c_uint64),
        ("base", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


class Backward(ctypes.Structure):
    """The inputs and outputs of the gradients of gate and up."""

    _fields_ = [
        ("gate", EncodedBlob),
        ("up", EncodedBlob),
        ("grad", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("grad_gate", ctypes.c_uint64),
        ("grad_up", ctypes.c_uint64),
        ("elements", ctypes.c_uint64),
        ("fixed_offset", ctypes.c_uint64),
        ("payload_offset", ctypes.c_uint64),
        ("tiles", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


def records(dtype: DType, elements: int, blobs: list[Blob], processors: int) -> Records:
    """Return the arguments of gemm_records, for a device with `processors` multiprocessors."""
    place = geometry(dtype, elements)
    blocks = max(1, min(RECORD_BLOCKS_A_PROCESSOR * processors, place.tiles))
    template = header(dtype, elements, 0).pack()
    words = (ctypes.c_uint64 * (_HEADER_BYTES // 8))(*struct.unpack("<32Q", template))
    filled = (Blob * 2)(*blobs)
    return Records(filled, elements, place.payload_offset, place.tiles, blocks, words)


def slot_bytes(elements: int) -> int:
    """Return the bytes of the slots that hold escapes until their records are written."""
    return elements // CHUNK * SLOT_BYTES


def product_blocks(variant: Variant, rows: int, columns: int, processors: int) -> int:
    """Return the number of blocks of a product: whole clusters, at most one per multiprocessor."""
    wide = PANEL_COLUMNS if variant.pairs else 2 * PANEL_COLUMNS
    tiles = -(-rows // (TILE_ROWS * variant.cluster)) * -(-columns // wide)
    return min(tiles, processors // variant.cluster) * variant.cluster


def backward_blocks(tiles: int) -> int:
    """Return the number of blocks of gemm_backward: one warp per tile."""
    return -(-tiles // (BACKWARD_THREADS // 32))
