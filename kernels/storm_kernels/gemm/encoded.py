"""A product's result as ANCF keeps it."""

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
    """A tensor that was encoded as it was made; any backend of `ancf.decode` reads its `blob`."""

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
        """Original bytes for each encoded byte."""
        return self.blob.ratio

    def decode(self, out: Tensor | None = None) -> Tensor:
        """Return the tensor, written to `out` where given; raise CorruptBlob for damage."""
        return decode(self.blob, out)


def from_room(room: Tensor, nbytes: int, shape: tuple[int, ...]) -> Encoded:
    """Return what the first `nbytes` of `room` hold, without the rest of it.

    A blob that is larger than the tensor becomes a raw one, as every encoder has it.
    """
    blob = Blob(room[:nbytes].clone(), shape, str(room.device))
    if nbytes > blob.raw_nbytes + 256:
        blob = encode(decode(blob), mode="raw", checksum=False)
    return Encoded(blob)
