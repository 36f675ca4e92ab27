"""How the tiles of one sequence learn, in a single launch, what state enters them.

A tile takes a ticket, so that every tile before it is running or done, and none waits for one that
cannot start. Written to base FAN, a tile's number names what lies before it: digit d of a level
says that d groups of FAN**level tiles do. Group by group, those are what a tile waits for, and
combines in the sequence's order:

    (first state) then (whole groups, the largest first) ... then (the single tiles just before it)

whatever was ready first, so the same input gives the same bits in every run. Nothing is handed on
from tile to tile: a group's map is published by its last tile, which needs the groups within it
alone, so a wait is as many steps deep as there are levels, however long the sequence is.

A tile publishes one map, of the largest group that ends with it: who waits for a smaller one would
lie in that group, behind its end. Maps thus have a place a tile.

Each 32 bits of a component travel in a 64-bit word whose upper half is the launch's number: data
and flag arrive together, without fences, and nobody needs to clear what earlier launches have left
in the words. The number is kept beside the counter of tickets, in one word (`take_ticket`): all
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

    Who takes the last one readies the counter for the next launch: all others have their tickets.
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
    """Publish what others need of `tile`, wait for what it needs, return the state that enters it.

    `words` are the sequence's, MAPS for each of N channels and tile, `launch` what take_ticket
    returned; `own` is the tile's map,
    `first` the state that enters tile 0; LIKE is a tensor of N numbers of the kind.
    """
    seen = ()  # a look at every level before waiting for any: their trips overlap
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
    """Return `left` then `right`, where there are both.

    Nothing is combined with the map that stands for none: an infinite factor would make NaN of it.
    """
    both = combine(left, right, OP)
    chosen = ()
    for i in tl.static_range(len(both)):
        one = tl.where(is_begin, left[i], both[i])
        chosen = chosen + (tl.where(has_left, one, right[i]),)
    return chosen


@triton.jit
def _publish(words, launch, maps, tile, N: tl.constexpr, MAPS: tl.constexpr):
    """Tell the tiles behind what the largest group that ends with `tile` does to a state."""
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
    """Return where the maps of the groups of `span` tiles before `tile` lie, and which it needs.

    Both are (FAN, N); a group's map lies at the place of its last tile.
    """
    place = tl.arange(0, FAN)[:, None]
    digit = tile // span % FAN
    end = ((tile // span - digit + place + 1) * span - 1).to(tl.int64)
    known = (place < digit) & (tl.arange(0, N)[None, :] < N)
    return words + end * (MAPS * N) + tl.arange(0, N)[None, :], known


@triton.jit
def _look(words, launch, tile, span, N: tl.constexpr, MAPS: tl.constexpr, FAN: tl.constexpr):
    """Return the words (FAN, N), MAPS of them, of the groups of `span` tiles, as they are now."""
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
    """Tell whether some word of `found` is not there yet."""
    missing = (found[0] ^ launch) >> 32
    for i in tl.static_range(1, len(found)):
        missing = missing | ((found[i] ^ launch) >> 32)
    return tl.max(tl.max((missing != 0).to(tl.int32), 0), 0) != 0
