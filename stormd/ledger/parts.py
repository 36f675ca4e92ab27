"""What a stored part is: its bytes, their type and codec, and the room of its largest blob."""

from __future__ import annotations

from typing import NamedTuple

from storm_kernels import ancf
from storm_kernels.ancf import DType

from stormd.memory.arena import granules

__all__ = ["Part", "blob_bound", "parse_dtype"]


class Part(NamedTuple):
    """`nbytes` to be stored; `bound` is the most that its blob has, `charge` that in granules."""

    nbytes: int
    dtype: DType
    codec: str
    bound: int
    charge: int

    @classmethod
    def of(cls, nbytes: int, dtype: str, codec: str) -> Part:
        """Return so many bytes of elements of the type of that name.

        Raises:
            ValueError: no such type, or no whole number of its elements.
        """
        kind, bound = parse_dtype(dtype, nbytes), blob_bound(nbytes)
        return cls(nbytes, kind, codec, bound, granules(bound))


def parse_dtype(name: str, nbytes: int) -> DType:
    """Return the element type of that name.

    Raises:
        ValueError: no such type, or `nbytes` is no whole number of its elements.
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
    """Return the most bytes that a blob of `nbytes` takes; in mode raw, exactly what it takes."""
    return ancf.max_encoded_bytes(nbytes, DType.BYTES)  # the same for all element types
