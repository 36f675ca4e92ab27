"""An encoded tensor: the blob's bytes, and the shape, which the bytes do not contain.

A `Blob` is immutable. Its bytes are in host memory or on a CUDA device, where the encoder wrote
them. `to_bytes` and `from_bytes` convert to and from the serialised form (FORMAT.md, section 13).
"""

from __future__ import annotations

import math
import struct
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CorruptBlob
from . import layout
from .checksum import checksum
from .header import HEAD_BYTES, Header, read_header

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Blob"]

_TOTAL_AT = 24  # offset of the blob's size in the header
_TRAILER_HEAD = struct.Struct("<4sI")
_CHECK = struct.Struct("<Q")


class Blob:
    """An encoded tensor, as `encode` returns it. `data` is a NumPy or torch array of uint8."""

    def __init__(
        self,
        data: NDArray[np.uint8] | torch.Tensor,
        shape: tuple[int, ...],
        device: str = "cpu",
    ) -> None:
        self._data = data
        self._shape = shape
        self._device = device

    @property
    def data(self) -> NDArray[np.uint8] | torch.Tensor:
        """The blob's bytes in their current memory; do not write to them."""
        return self._data

    @property
    def device(self) -> str:
        """The original tensor's device, and the default device of `decode`."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Encoded bytes, header included."""
        return int(self._data.nbytes)

    @property
    def raw_nbytes(self) -> int:
        """Original bytes."""
        return self.header.raw_nbytes

    @property
    def ratio(self) -> float:
        """Original bytes divided by encoded bytes."""
        return self.raw_nbytes / self.nbytes

    @property
    def mode(self) -> str:
        """The name of the mode that was used, in lower case."""
        return self.header.mode.name.lower()

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's torch dtype."""
        import torch

        dtype: torch.dtype = getattr(torch, self.header.dtype.torch_name)
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self._shape

    @cached_property
    def header(self) -> Header:
        """The blob's header; raises CorruptBlob if it is damaged."""
        head = self._data[:HEAD_BYTES]
        on_host = head if isinstance(head, np.ndarray) else head.cpu().numpy()
        return read_header(on_host, self.nbytes)

    def host_data(self) -> NDArray[np.uint8]:
        """Return the blob's bytes in host memory; bytes on a device are copied."""
        if isinstance(self._data, np.ndarray):
            return self._data
        copied: NDArray[np.uint8] = self._data.cpu().numpy()
        return copied

    def to_bytes(self) -> bytes:
        """Return the serialised tensor: blob, shape and a check of both."""
        body = self.host_data().tobytes() + _TRAILER_HEAD.pack(
            layout.TRAILER_MAGIC, len(self._shape)
        )
        body += struct.pack(f"<{len(self._shape)}Q", *self._shape)
        return body + _CHECK.pack(checksum(np.frombuffer(body, np.uint8)))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Blob:
        """Return the blob that `to_bytes` serialised; raise CorruptBlob for damaged bytes."""
        view = np.frombuffer(data, np.uint8)
        end = _blob_bytes(view)
        shape = _read_trailer(view, end)
        blob = cls(view[:end], shape)
        items = blob.raw_nbytes // blob.header.dtype.item_bytes
        if math.prod(shape) != items or blob.raw_nbytes % blob.header.dtype.item_bytes:
            raise CorruptBlob(f"shape {shape} does not hold {blob.raw_nbytes} bytes")
        _check_possible(shape)
        return blob

    def __repr__(self) -> str:
        return (
            f"Blob({self.mode}, {self.header.dtype.torch_name}, shape={self._shape}, "
            f"{self.nbytes} of {self.raw_nbytes} bytes)"
        )


def _check_possible(shape: tuple[int, ...]) -> None:
    """Raise CorruptBlob for a shape that no tensor can have, even if an extent is 0."""
    import torch

    try:
        torch.empty(shape, device="meta")
    except (TypeError, RuntimeError) as error:
        raise CorruptBlob(f"no tensor can have shape {shape}: {error}") from error


def _blob_bytes(view: NDArray[np.uint8]) -> int:
    least = layout.HEADER_BYTES + _TRAILER_HEAD.size + _CHECK.size
    if view.size < least:
        raise CorruptBlob(f"{view.size} bytes are too few for a serialised tensor ({least})")
    total = int.from_bytes(view[_TOTAL_AT : _TOTAL_AT + 8].tobytes(), "little")
    if not layout.HEADER_BYTES <= total <= view.size - _TRAILER_HEAD.size - _CHECK.size:
        raise CorruptBlob(f"the header asks for {total} bytes and a trailer, got {view.size}")
    return total


def _read_trailer(view: NDArray[np.uint8], start: int) -> tuple[int, ...]:
    body = view[: -_CHECK.size]
    if _CHECK.unpack(view[-_CHECK.size :].tobytes())[0] != checksum(body):
        raise CorruptBlob("the serialised tensor does not match its check")
    trailer = body[start:].tobytes()
    magic, ndim = _TRAILER_HEAD.unpack_from(trailer)
    if magic != layout.TRAILER_MAGIC or len(trailer) != _TRAILER_HEAD.size + 8 * ndim:
        raise CorruptBlob(f"a trailer of {len(trailer)} bytes for {ndim} dimensions")
    return struct.unpack_from(f"<{ndim}Q", trailer, _TRAILER_HEAD.size)
