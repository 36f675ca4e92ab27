"""Reverses and shifts rows by vectors: the few numbers that a thread loads at once.

A contiguous sequence that is scanned backwards could be loaded backwards, number by number. Or it
could be loaded forwards, and Triton would reverse it across all threads, with five exchanges for
each number. Here vectors are in decreasing order, each loaded in increasing order. Only the V
numbers of a vector are reversed, which moves no data, as they belong to one thread. Shifts by one
work the same way, with one more load per vector.

Tensors are (M, V), one vector per row. V is a power of two, and a vector is as many bytes as one
load. With other sizes Triton distributes vectors across threads, and these functions are still
correct but exchange numbers.
"""

# ruff: noqa: RET505 - Triton compiles what follows a branch although the branch has returned

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["following", "preceding", "turned"]


@triton.jit
def turned(x):
    """Return each vector's numbers in reverse order."""
    if x.shape[1] == 1:
        return x
    else:
        even, odd = _halves(x)
        return _interleaved(turned(odd), turned(even))


@triton.jit
def preceding(x, before):
    """Return the predecessor of each number; `before` (M) are the numbers before each vector."""
    if x.shape[1] == 1:
        return before[:, None]
    else:
        even, odd = _halves(x)
        return _interleaved(preceding(odd, before), even)


@triton.jit
def following(x, behind):
    """Return the successor of each number; `behind` (M) are the numbers after each vector."""
    if x.shape[1] == 1:
        return behind[:, None]
    else:
        even, odd = _halves(x)
        return _interleaved(odd, following(even, behind))


@triton.jit
def _halves(x):
    """Return the numbers at even and at odd indices, each as (M, V / 2)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _interleaved(even, odd):
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
