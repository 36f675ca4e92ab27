"""Rows by vectors: the few neighbours that a thread loads at once, moved about in its registers.

A sequence that lies side by side and is scanned backwards could be loaded backwards, number by
number; or forwards, and Triton would turn it round across all threads, in five exchanges for each
number. Here vectors come in falling order, each loaded in rising order, and only the V numbers of a
vector are turned round, which moves nothing: they are the same thread's. Neighbours one place on
come the same way, with one more load a vector.

Tensors are (M, V), a vector a row. V is a power of two, and of as many bytes as a load takes: of
more or fewer, Triton lays vectors across threads, and what follows is right but exchanges numbers.
"""

# ruff: noqa: RET505 - Triton compiles what follows a branch although the branch has returned

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["following", "preceding", "turned"]


@triton.jit
def turned(x):
    """Return each vector's numbers in the opposite order."""
    if x.shape[1] == 1:
        return x
    else:
        even, odd = _halves(x)
        return _interleaved(turned(odd), turned(even))


@triton.jit
def preceding(x, before):
    """Return what lies one place before each number; `before` (M) are what precedes vectors."""
    if x.shape[1] == 1:
        return before[:, None]
    else:
        even, odd = _halves(x)
        return _interleaved(preceding(odd, before), even)


@triton.jit
def following(x, behind):
    """Return what lies one place behind each number; `behind` (M) are what follows vectors."""
    if x.shape[1] == 1:
        return behind[:, None]
    else:
        even, odd = _halves(x)
        return _interleaved(odd, following(even, behind))


@triton.jit
def _halves(x):
    """Return the numbers at even places, and at odd ones, as (M, V / 2)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _interleaved(even, odd):
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
