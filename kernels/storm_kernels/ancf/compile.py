"""Compiles the CUDA codec ahead of its first use.

    CUPY_CACHE_DIR=/var/cache/stormd/cupy python -m storm_kernels.ancf.compile [bfloat16 ...]

Afterwards a process with the same cache, sources and kind of GPU compiles nothing. The command
needs such a GPU. So run it when you set up a node or a volume, not in the build of an image.
"""

from __future__ import annotations

import sys
import time

from .cuda import CudaCodec
from .dtypes import DType

__all__ = ["main"]


def main(names: list[str]) -> None:
    """Compile for the named element types, or for all without names; print when each is ready.

    Raises:
        SystemExit: a type does not exist.
        BackendUnavailable: the GPU, CuPy or the compiler is missing.
    """
    if unknown := [name for name in names if name.upper() not in DType.__members__]:
        known = ", ".join(dtype.name.lower() for dtype in DType)
        raise SystemExit(f"unknown element types {', '.join(unknown)}; there are {known}")
    dtypes = [DType[name.upper()] for name in names] or list(DType)
    began = time.monotonic()
    for dtype in CudaCodec().prepare_each(dtypes):
        sys.stdout.write(f"{dtype.name.lower()}: {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
