"""Computes, in a single launch, the state that enters each tile of a sequence (look-back).

A tile takes a ticket, so every earlier tile is running or done, and no tile waits for one that
cannot start. The base-FAN digits of a tile's number describe the tiles before it: digit d of a
level means d groups of FAN**level tiles. A tile waits for the maps of these groups and combines
them in sequence order:

    (first state) then (whole groups, the largest first) ... then (the single tiles just before it)

The order does not depend on which map is ready first, so the same input gives the same bits in
every run. There is no serial chain from tile to tile: the last tile of a group publishes the
group's map and needs only the groups within it. So the depth of a wait is the number of levels,
however long the sequence is.

A tile publishes one map: that of the largest group that ends with it. A tile that waited for a
smaller group with this end would be in the larger group, after its end. So maps need one slot per
tile.

Each 32 bits of a component are published in a 64-bit word whose upper half is the launch's number.
Data and flag thus arrive together, without fences, and nobody needs to clear the words of earlier
launches. The launch number shares a word with the ticket counter (`take_ticket`). All words are
zero before the first launch, which is number 1.
"""

# ruff: noqa: RUF005, SIM108 - Triton takes no starred tuples, and choices of constants as branches

from __future__ import annotations

import triton
import triton.language as tl

from .combine import apply, combine, edge, identity, scan

__all__ = ["entering_state", "take_ticket"]

LOWER = tl.constexpr((1 << 32) - 1)


@triton.jit
def take_ticket(counter, tickets):
    """Return the next of a launch's `tickets`, and the launch's number in a word's upper half.

    The program that takes the last ticket resets the counter for the next launch: all other
    programs already have their tickets.
    """
    word = tl.atomic_add(counter, 1, sem="relaxed")
    ticket = (word & LOWER).to(tl.int32)
    launch = ((word >> 32) + 1) << 32
    if ticket == tickets - 1:
        tl.atomic_xchg(counter, launch, sem="relaxed")
    return ticket, launch


@triton.jit
def entering_state(
    words,
    launch,
    first,
    own,
    tile,
    LIKE,
    OP: tl.constexpr,
    NEUTRAL: tl.constexpr,
    N: tl.constexpr,
    MAPS: tl.constexpr,
    FAN: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Publish the map of `tile`, wait for the maps it needs, and return the state that enters it.

    `words` are the sequence's words, MAPS for each of N channels and each tile. `launch` is from
    take_ticket. `own` is the tile's map, `first` the state that enters tile 0. LIKE is a tensor of
    N numbers of the accumulator's type.
    """
    seen = ()  # load all levels before waiting for any, so that latencies overlap
    span = 1
    for _ in tl.static_range(LEVELS):
        seen = seen + (_look(words, launch, tile, span, N, MAPS, FAN),)
        span *= FAN
    before = identity(LIKE, OP, NEUTRAL)
    is_group_end = tile >= 0
    is_begin = tile >= 0
    span = 1
    for level in tl.static_range(LEVELS):
        digit = tile // span % FAN
        if is_group_end & (digit < FAN - 1):
            if level == 0:
                _publish(words, launch, own, tile, N, MAPS)
            else:
                _publish(words, launch, combine(before, own, OP), tile, N, MAPS)
        group = _take(words, launch, seen[level], tile, span, LIKE, OP, NEUTRAL, N, MAPS, FAN)
        if level == 0:
            before = group
        else:
            before = _joined(group, before, digit > 0, is_begin, OP)
        is_group_end = is_group_end & (digit == FAN - 1)
        is_begin = is_begin & (digit == 0)
        span *= FAN
    return apply(first, before, OP)


@triton.jit
def _joined(left, right, has_left, is_begin, OP: tl.constexpr):
    """Return the map of `left` then `right`, or the only one of them that exists.

    An absent map is not combined as an identity map: an infinite factor would turn that into NaN.
    """
    both = combine(left, right, OP)
    chosen = ()
    for i in tl.static_range(len(both)):
        one = tl.where(is_begin, left[i], both[i])
        chosen = chosen + (tl.where(has_left, one, right[i]),)
    return chosen


@triton.jit
def _publish(words, launch, maps, tile, N: tl.constexpr, MAPS: tl.constexpr):
    """Publish to later tiles the map of the largest group that ends with `tile`."""
    address = words + tile.to(tl.int64) * (MAPS * N) + tl.arange(0, N)
    wide: tl.constexpr = MAPS // len(maps)
    for i in tl.static_range(len(maps)):
        part = maps[i]
        if wide == 2:
            bits = part.to(tl.int64, bitcast=True)
            tl.atomic_xchg(address + (2 * i) * N, (bits & LOWER) | launch, sem="relaxed")
            upper = ((bits >> 32) & LOWER) | launch
            tl.atomic_xchg(address + (2 * i + 1) * N, upper, sem="relaxed")
        else:
            bits = part.to(tl.uint32, bitcast=True).to(tl.int64)
            tl.atomic_xchg(address + i * N, bits | launch, sem="relaxed")


@triton.jit
def _groups(words, tile, span, N: tl.constexpr, MAPS: tl.constexpr, FAN: tl.constexpr):
    """Return the addresses of the maps of groups of `span` tiles, and which of them `tile` needs.

    Both are (FAN, N); a group's map is in the slot of its last tile.
    """
    place = tl.arange(0, FAN)[:, None]
    digit = tile // span % FAN
    end = ((tile // span - digit + place + 1) * span - 1).to(tl.int64)
    known = (place < digit) & (tl.arange(0, N)[None, :] < N)
    return words + end * (MAPS * N) + tl.arange(0, N)[None, :], known


@triton.jit
def _look(words, launch, tile, span, N: tl.constexpr, MAPS: tl.constexpr, FAN: tl.constexpr):
    """Return the present words of the groups of `span` tiles, as MAPS tensors (FAN, N)."""
    address, known = _groups(words, tile, span, N, MAPS, FAN)
    found = ()
    for i in tl.static_range(MAPS):
        found = found + (tl.load(address + i * N, mask=known, other=launch, volatile=True),)
    return found


@triton.jit
def _take(
    words,
    launch,
    found,
    tile,
    span,
    LIKE,
    OP: tl.constexpr,
    NEUTRAL: tl.constexpr,
    N: tl.constexpr,
    MAPS: tl.constexpr,
    FAN: tl.constexpr,
):
    """Wait for the maps of the groups of `span` tiles, and return them combined in order."""
    while _is_missing(found, launch):
        found = _look(words, launch, tile, span, N, MAPS, FAN)
    place = tl.arange(0, FAN)[:, None]
    known = place < tile // span % FAN
    none = identity(tl.broadcast_to(LIKE[None, :], (FAN, N)), OP, NEUTRAL)
    wide: tl.constexpr = MAPS // len(none)
    maps = ()
    for i in tl.static_range(len(none)):
        lower = found[wide * i] & LOWER
        if wide == 2:
            value = ((found[wide * i + 1] & LOWER) << 32) | lower
        else:
            value = lower.to(tl.uint32)
        value = value.to(none[i].dtype, bitcast=True)
        maps = maps + (tl.where(known, value, none[i]),)
    return edge(scan(maps, 0, OP), place == FAN - 1, 0)


@triton.jit
def _is_missing(found, launch):
    """Return whether any word of `found` is not published yet."""
    missing = (found[0] ^ launch) >> 32
    for i in tl.static_range(1, len(found)):
        missing = missing | ((found[i] ^ launch) >> 32)
    return tl.max(tl.max((missing != 0).to(tl.int32), 0), 0) != 0
