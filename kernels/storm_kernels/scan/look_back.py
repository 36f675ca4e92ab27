"""How the tiles of one sequence learn, in a single launch, what state enters them.

A tile takes a ticket, so that every tile before it is running or done, and none waits for one that
cannot start. It publishes its own map at once. Tiles form windows of WINDOW; the state that enters
tile i of a window is

    (state after the window before) then (maps of the window's tiles 0 .. i-1, combined in order)

whatever was ready first, so the same input gives the same bits in every run. The window's last
tile publishes the state after it; a long sequence thus waits for one tile in WINDOW alone.

Each 32 bits of a component travel in a 64-bit word that says in its upper half that it is there:
data and flag arrive together, without fences. The words are zero when the kernel starts.
"""

# ruff: noqa: RET505 - Triton compiles what follows a branch although the branch has returned

from __future__ import annotations

import triton
import triton.language as tl

from .combine import apply, edge, identity, scan, seed

__all__ = ["entering_state", "publish_map", "publish_state"]

READY = tl.constexpr(1 << 32)
LOWER = tl.constexpr((1 << 32) - 1)


@triton.jit
def entering_state(
    words,
    states,
    first,
    tile,
    chain,
    chains,
    LIKE,
    OP: tl.constexpr,
    NEUTRAL: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    MAPS: tl.constexpr,
    STATES: tl.constexpr,
):
    """Wait for, and return, the state of N channels that enters `tile` of `chain`.

    `words` are the published maps, `states` the published states, each MAPS or STATES words a
    channel; `first` is what enters tile 0; LIKE is a tensor of N numbers of the kind.
    """
    window = tile // WINDOW
    place = tile % WINDOW
    state = first
    if place > 0:
        within = _take_window(
            words, window * WINDOW, place, chain, chains, LIKE, OP, NEUTRAL, N, WINDOW, MAPS
        )
    else:
        within = identity(LIKE, OP, NEUTRAL)
    if window > 0:
        block = ((window - 1).to(tl.int64) * chains + chain) * (STATES * N)
        state = _take_state(states + block + tl.arange(0, N), LIKE, OP, NEUTRAL, N)
    return apply(state, within, OP)


@triton.jit
def publish_map(words, maps, tile, chain, chains, N: tl.constexpr, MAPS: tl.constexpr):
    """Tell the tiles behind what `tile` does to a state."""
    block = (tile.to(tl.int64) * chains + chain) * (MAPS * N)
    _publish(words + block + tl.arange(0, N), maps, N)


@triton.jit
def publish_state(
    states,
    state,
    tile,
    chain,
    chains,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    STATES: tl.constexpr,
):
    """Tell the windows behind what state leaves `tile`, the last of its window."""
    block = ((tile // WINDOW).to(tl.int64) * chains + chain) * (STATES * N)
    _publish(states + block + tl.arange(0, N), state, N)


@triton.jit
def _take_window(
    words,
    begin,
    count,
    chain,
    chains,
    LIKE,
    OP: tl.constexpr,
    NEUTRAL: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    MAPS: tl.constexpr,
):
    """Return the maps of tiles [begin, begin + count), combined in order."""
    place = tl.arange(0, WINDOW)[:, None]
    known = (place < count) & (tl.arange(0, N)[None, :] < N)
    block = ((begin + place).to(tl.int64) * chains + chain) * (MAPS * N)
    address = words + block + tl.arange(0, N)[None, :]
    like = tl.broadcast_to(LIKE[None, :], (WINDOW, N))
    none = identity(like, OP, NEUTRAL)
    wide: tl.constexpr = LIKE.dtype.primitive_bitwidth // 32
    if len(none) == 1:
        maps = (_take(address, known, none[0], N),)
    elif len(none) == 2:
        maps = (
            _take(address, known, none[0], N),
            _take(address + wide * N, known, none[1], N),
        )
    else:
        maps = (
            _take(address, known, none[0], N),
            _take(address + wide * N, known, none[1], N),
            _take(address + 2 * wide * N, known, none[2], N),
            _take(address + 3 * wide * N, known, none[3], N),
        )
    return edge(scan(maps, 0, OP, False), place == WINDOW - 1, 0)


@triton.jit
def _take_state(address, LIKE, OP: tl.constexpr, NEUTRAL: tl.constexpr, N: tl.constexpr):
    none = seed(LIKE, OP, NEUTRAL)
    known = tl.arange(0, N) < N
    wide: tl.constexpr = LIKE.dtype.primitive_bitwidth // 32
    if len(none) == 1:
        return (_take(address, known, none[0], N),)
    else:
        return (
            _take(address, known, none[0], N),
            _take(address + wide * N, known, none[1], N),
        )


@triton.jit
def _publish(address, parts, N: tl.constexpr):
    wide: tl.constexpr = parts[0].dtype.primitive_bitwidth // 32
    for i in tl.static_range(len(parts)):
        part = parts[i]
        if wide == 2:
            bits = part.to(tl.int64, bitcast=True)
            tl.atomic_xchg(address + (2 * i) * N, (bits & LOWER) | READY, sem="relaxed")
            upper = ((bits >> 32) & LOWER) | READY
            tl.atomic_xchg(address + (2 * i + 1) * N, upper, sem="relaxed")
        else:
            bits = part.to(tl.uint32, bitcast=True).to(tl.int64)
            tl.atomic_xchg(address + i * N, bits | READY, sem="relaxed")


@triton.jit
def _take(address, known, none, N: tl.constexpr):
    """Wait until the words that are `known` to come are there; elsewhere give `none`."""
    lower = _wait(address, known)
    if none.dtype.primitive_bitwidth == 64:
        upper = _wait(address + N, known)
        value = (((upper & LOWER) << 32) | (lower & LOWER)).to(none.dtype, bitcast=True)
    else:
        value = (lower & LOWER).to(tl.uint32).to(none.dtype, bitcast=True)
    return tl.where(known, value, none)


@triton.jit
def _wait(address, known):
    word = tl.load(address, mask=known, other=READY, volatile=True)
    while tl.min(word >> 32) == 0:
        word = tl.load(address, mask=known, other=READY, volatile=True)
    return word
