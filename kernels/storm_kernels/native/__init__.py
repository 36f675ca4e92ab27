"""Finds and loads the C library that ANCF, scans and ternary products share, and probes it.

Its functions take plain addresses and do not use Python's C API, so one build serves every Python
version. Each package declares its own functions (`ancf/cpu.py` and similar modules). The C code
that the packages share is in this folder: detection of instruction sets, and threads.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["InstructionSet", "Status", "available_sets", "load", "probe"]

ABI_VERSION = 2  # STORM_ABI_VERSION in native.h
FILE_NAME = "libstorm_kernels.so"


class InstructionSet(IntEnum):
    """Instruction sets that the library may use; the values are `enum storm_isa` in native.h."""

    BEST = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class Status(IntEnum):
    """Error codes that the library's functions return; `enum storm_status` in native.h."""

    CORRUPT = -1
    TOO_SMALL = -2
    BAD_ARGUMENT = -3
    NO_MEMORY = -4
    UNSUPPORTED = -5


@cache
def load() -> ctypes.CDLL:
    """Return the library; calls into it release the interpreter lock.

    Raises BackendUnavailable if no library was built, if it cannot be loaded, or if its interface
    has another version than this package needs.
    """
    path = next((path for path in _candidates() if path.is_file()), None)
    if path is None:
        folders = ", ".join(str(path.parent) for path in _candidates())
        raise BackendUnavailable(
            f"{FILE_NAME} is in none of {folders}; reinstall the package where a C compiler is"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailable(f"{path} cannot be loaded: {error}") from error
    if (found := library.storm_abi_version()) != ABI_VERSION:
        raise BackendUnavailable(
            f"{path} has version {found} of the interface, this package needs {ABI_VERSION}; "
            "reinstall it"
        )
    library.storm_isa_available.argtypes = [ctypes.c_int]
    return library


def available_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this build and this processor support, the best last."""
    library = load()
    sets = (one for one in InstructionSet if one is not InstructionSet.BEST)
    return tuple(one for one in sets if library.storm_isa_available(one))


def probe() -> tuple[bool, str]:
    """Return whether the library works here, and its best instruction set or the failure reason."""
    try:
        best = available_sets()[-1]
    except BackendUnavailable as missing:
        return False, str(missing)
    return True, best.name.lower()


def _candidates() -> Iterator[Path]:
    """Yield possible paths: a wheel has the library here, an editable install in site-packages."""
    import storm_kernels

    folders = [*__path__, *(f"{folder}/native" for folder in storm_kernels.__path__)]
    return (Path(folder) / FILE_NAME for folder in dict.fromkeys(folders))
