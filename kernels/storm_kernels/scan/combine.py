"""The operations of the Triton scan kernels, each on a tuple of components.

A *map* describes how a section of a sequence transforms the state before it to the *state* after
it. For sums and similar operations both are one number; a compensated sum adds its rounding error
as a second component. For h = a*h + b a map is (a, b) and a state is (h,); a complex number is two
components. Combining maps keeps the order: the left map comes first in the sequence.

Triton compiles the code after a branch even if the branch returned. So each choice among operations
is one chain that ends in an `else`.
"""

# ruff: noqa: RET505 - see above

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply", "combine", "edge", "identity", "lift", "read", "scan", "seed"]

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _add(x, y):
    return x + y


@triton.jit
def _mul(x, y):
    return x * y


@triton.jit
def _max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log1p(x):
    """Return log(1 + x) by Kahan's method: the error of 1 + x cancels in the quotient."""
    one_more = 1.0 + x
    return tl.where(one_more == 1.0, x, tl.log(one_more) * (x / (one_more - 1.0)))


@triton.jit
def _logaddexp(x, y):
    larger = _max(x, y)
    return tl.where(x == y, x + LN2, larger + _log1p(tl.exp(-tl.abs(x - y))))


@triton.jit
def _two_sum(sum1, error1, sum2, error2):
    """Return the total and its rounding error by Knuth's method; an infinite total has error 0."""
    total = sum1 + sum2
    back = total - sum1
    lost = (sum1 - (total - back)) + (sum2 - back)
    error = error1 + error2 + lost
    return total, tl.where(tl.abs(total) < float("inf"), error, 0.0)


@triton.jit
def _linear(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@triton.jit
def _complex_linear(a1r, a1i, b1r, b1i, a2r, a2i, b2r, b2i):
    return (
        a1r * a2r - a1i * a2i,
        a1r * a2i + a1i * a2r,
        a2r * b1r - a2i * b1i + b2r,
        a2r * b1i + a2i * b1r + b2i,
    )


@triton.jit
def scan(maps, AXIS: tl.constexpr, OP: tl.constexpr):
    """Return the inclusive scan of a tuple of tensors along an axis.

    The scan is always forwards: for a backward scan, Triton would reverse the lanes before and
    after. So kernels place the elements in scan order.
    """
    if OP == "add":
        return tl.associative_scan(maps, AXIS, _add)
    elif OP == "mul":
        return tl.associative_scan(maps, AXIS, _mul)
    elif OP == "max":
        return tl.associative_scan(maps, AXIS, _max)
    elif OP == "min":
        return tl.associative_scan(maps, AXIS, _min)
    elif OP == "logaddexp":
        return tl.associative_scan(maps, AXIS, _logaddexp)
    elif OP == "compensated":
        return tl.associative_scan(maps, AXIS, _two_sum)
    elif OP == "linear":
        return tl.associative_scan(maps, AXIS, _linear)
    else:
        tl.static_assert(OP == "complex_linear")
        return tl.associative_scan(maps, AXIS, _complex_linear)


@triton.jit
def combine(left, right, OP: tl.constexpr):
    """Return the map that applies `left` and then `right`."""
    if OP == "add":
        return (_add(left[0], right[0]),)
    elif OP == "mul":
        return (_mul(left[0], right[0]),)
    elif OP == "max":
        return (_max(left[0], right[0]),)
    elif OP == "min":
        return (_min(left[0], right[0]),)
    elif OP == "logaddexp":
        return (_logaddexp(left[0], right[0]),)
    elif OP == "compensated":
        return _two_sum(left[0], left[1], right[0], right[1])
    elif OP == "linear":
        return _linear(left[0], left[1], right[0], right[1])
    else:
        tl.static_assert(OP == "complex_linear")
        return _complex_linear(
            left[0], left[1], left[2], left[3], right[0], right[1], right[2], right[3]
        )


@triton.jit
def apply(state, maps, OP: tl.constexpr):
    """Return the state after a section whose map is `maps` and whose entering state is `state`."""
    if OP == "linear":
        return (maps[0] * state[0] + maps[1],)
    elif OP == "complex_linear":
        return (
            maps[0] * state[0] - maps[1] * state[1] + maps[2],
            maps[0] * state[1] + maps[1] * state[0] + maps[3],
        )
    else:
        return combine(state, maps, OP)


@triton.jit
def identity(like, OP: tl.constexpr, NEUTRAL: tl.constexpr):
    """Return the identity map; NEUTRAL is the neutral element of one-component operations."""
    none = tl.zeros_like(like)
    if OP == "linear":
        return (none + 1, none)
    elif OP == "complex_linear":
        return (none + 1, none, none, none)
    elif OP == "compensated":
        return (none, none)
    else:
        return (tl.full(like.shape, NEUTRAL, like.dtype),)


@triton.jit
def seed(like, OP: tl.constexpr, NEUTRAL: tl.constexpr):
    """Return the default state before the first element."""
    if OP == "linear":
        return (tl.zeros_like(like),)
    elif OP == "complex_linear":
        return (tl.zeros_like(like), tl.zeros_like(like))
    else:
        return identity(like, OP, NEUTRAL)


@triton.jit
def lift(value, OP: tl.constexpr):
    """Return an element of a sum, product or similar operation as a map."""
    if OP == "compensated":
        return (value, tl.zeros_like(value))
    else:
        return (value,)


@triton.jit
def read(state, OP: tl.constexpr):
    """Return the value of a state of a sum, product or similar operation."""
    if OP == "compensated":
        return state[0] + state[1]
    else:
        return state[0]


@triton.jit
def edge(maps, chosen, AXIS: tl.constexpr):
    """Return the components at the single index along AXIS where `chosen` is true."""
    if len(maps) == 1:
        return (_pick(maps[0], chosen, AXIS),)
    elif len(maps) == 2:
        return (_pick(maps[0], chosen, AXIS), _pick(maps[1], chosen, AXIS))
    else:
        return (
            _pick(maps[0], chosen, AXIS),
            _pick(maps[1], chosen, AXIS),
            _pick(maps[2], chosen, AXIS),
            _pick(maps[3], chosen, AXIS),
        )


@triton.jit
def _pick(component, chosen, AXIS: tl.constexpr):
    return tl.sum(tl.where(chosen, component, 0), AXIS)
