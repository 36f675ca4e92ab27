"""The C library, found and loaded: plain functions over addresses, with no Python ABI involved.

The one thing that stays true: what `load` returns matches this package's declarations, because
the library's own version number is compared. A missing library is a `BackendUnavailable` that
says where it was looked for; nothing here compiles or installs anything.
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

__all__ = ["InstructionSet", "Options", "Status", "available_sets", "load"]

ABI_VERSION = 2  # STORM_ABI_VERSION in ancf.h
FILE_NAME = "libstorm_kernels.so"


class InstructionSet(IntEnum):
    """What the library may use; the values are `enum storm_isa` in ancf.h."""

    BEST = -1
    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class Status(IntEnum):
    """What a function of the library returns when it fails; `enum storm_status` in ancf.h."""

    CORRUPT = -1
    TOO_SMALL = -2
    BAD_ARGUMENT = -3
    NO_MEMORY = -4
    UNSUPPORTED = -5


class Options(ctypes.Structure):
    """`struct storm_ancf_options` in ancf.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("mode", "dense", "checksum", "policy", "threads", "isa")
    )


@cache
def load() -> ctypes.CDLL:
    """Return the library, its functions declared; calls let go of the interpreter lock.

    Raises BackendUnavailable when no library was built, or one that is older than this package.
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
    return _declare(library)


def available_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that this build and this processor have, the best last."""
    library = load()
    sets = (one for one in InstructionSet if one is not InstructionSet.BEST)
    return tuple(one for one in sets if library.storm_isa_available(one))


def _candidates() -> Iterator[Path]:
    """A wheel has the library beside this file; an editable install keeps it in site-packages."""
    import storm_kernels

    folders = [*__path__, *(f"{folder}/cpu" for folder in storm_kernels.__path__)]
    return (Path(folder) / FILE_NAME for folder in dict.fromkeys(folders))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    address, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    options = ctypes.POINTER(Options)
    library.storm_isa_available.argtypes = [number]
    library.storm_ancf_encode.argtypes = [address, size, number, address, size, options]
    library.storm_ancf_encode.restype = ctypes.c_int64
    library.storm_ancf_decode.argtypes = [address, size, address, size, options]
    library.storm_ancf_checksum.argtypes = [address, size, number]
    library.storm_ancf_checksum.restype = ctypes.c_uint64
    library.storm_ancf_copy_checksum.argtypes = [address, address, size, number]
    library.storm_ancf_copy_checksum.restype = ctypes.c_uint64
    return library
