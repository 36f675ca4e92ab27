"""The result of a matrix product, encoded as an ANCF blob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ancf import Blob, decode, encode

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Encoded", "from_room"]


@dataclass(frozen=True)
class Encoded:
    """A product that was encoded when computed; any backend of `ancf.decode` reads its `blob`."""

    blob: Blob

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.blob.shape

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.blob.dtype

    @property
    def nbytes(self) -> int:
        """Encoded bytes."""
        return self.blob.nbytes

    @property
    def raw_nbytes(self) -> int:
        """Original bytes."""
        return self.blob.raw_nbytes

    @property
    def ratio(self) -> float:
        """Original bytes divided by encoded bytes."""
        return self.blob.ratio

    def decode(self, out: Tensor | None = None) -> Tensor:
        """Return the tensor, in `out` if given; raise CorruptBlob for a damaged blob."""
        return decode(self.blob, out)


def from_room(room: Tensor, nbytes: int, shape: tuple[int, ...]) -> Encoded:
    """Return a copy of the blob in the first `nbytes` of `room`.

    A blob that is larger than the raw tensor and a header becomes a raw blob, as in every encoder.
    """
    blob = Blob(room[:nbytes].clone(), shape, str(room.device))
    if nbytes > blob.raw_nbytes + 256:
        blob = encode(decode(blob), mode="raw", checksum=False)
    return Encoded(blob)
