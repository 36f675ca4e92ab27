"""A chunk to store: its bytes, element type and codec, and its blob's maximum size."""

from __future__ import annotations

from typing import NamedTuple

from storm_kernels import ancf
from storm_kernels.ancf import DType

from stormd.memory.arena import granules

__all__ = ["Chunk", "blob_bound", "parse_dtype"]


class Chunk(NamedTuple):
    """`nbytes` to store. `bound` is the blob's maximum size, `charge` that size in granules."""

    nbytes: int
    dtype: DType
    codec: str
    bound: int
    charge: int

    @classmethod
    def of(cls, nbytes: int, dtype: str, codec: str) -> Chunk:
        """Return a Chunk of `nbytes` with elements of the named type.

        Raises:
            ValueError: there is no such type, or `nbytes` is no whole number of its elements.
        """
        kind, bound = parse_dtype(dtype, nbytes), blob_bound(nbytes)
        return cls(nbytes, kind, codec, bound, granules(bound))


def parse_dtype(name: str, nbytes: int) -> DType:
    """Return the element type of that name.

    Raises:
        ValueError: there is no such type, or `nbytes` is no whole number of its elements.
    """
    dtype = DType.__members__.get(name.upper())
    if dtype is None:
        known = ", ".join(member.name.lower() for member in DType)
        raise ValueError(f"dtype {name!r:.60} is unknown: send one of {known}")
    if nbytes % dtype.element_bytes:
        raise ValueError(
            f"{nbytes} bytes are no whole number of {name} elements of {dtype.element_bytes}"
        )
    return dtype


def blob_bound(nbytes: int) -> int:
    """Return the maximum size of a blob for `nbytes`; in mode raw, its exact size."""
    return ancf.max_encoded_bytes(nbytes, DType.BYTES)  # the same for all element types
