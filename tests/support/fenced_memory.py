"""Memory that ends where pages begin that nobody may touch: an access outside ends the process."""

from __future__ import annotations

import ctypes

import numpy as np

PAGE = 4096
_ALIGN = 16  # bytes, as the kernels ask of blobs and scratch
_NONE, _READ_WRITE = 0, 3
_PRIVATE_ANONYMOUS = 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Fenced:
    """`nbytes` at `offset` past a multiple of 16, less than 16 bytes before a fence.

    The mapping lives as long as the object; `data` must not be used after it.
    """

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        pages = -(-max(nbytes + offset, 1) // PAGE)
        self._bytes = (pages + 2) * PAGE
        self._base = _libc.mmap(None, self._bytes, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        if self._base in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"cannot map {self._bytes} bytes")
        end = self._base + (pages + 1) * PAGE
        for fence in (self._base, end):
            _libc.mprotect(fence, PAGE, _NONE)
        start = end - -(-(nbytes + offset) // _ALIGN) * _ALIGN + offset
        self.address = ctypes.c_void_p(start)
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))

    def check(self) -> None:
        """Do nothing: an access outside has ended the process."""

    def __del__(self) -> None:
        _libc.munmap(self._base, self._bytes)
