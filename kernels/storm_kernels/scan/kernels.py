"""The Triton kernels: they process one tile of a sequence at a time, in one of two shapes.

Columns (channels are contiguous, as in batch, length, channels): a tile is R * G rows of N
channels, held as (G, R, N). So a thread has R consecutive rows of its channels in registers and
scans them without communication; threads exchange only G sums per channel. Rows (the length is
contiguous): a tile is N consecutive elements of one sequence, in vectors of V.

Tiles are held in scan order, so every scan of lanes is forwards. For a backward scan, row numbers
of columns decrease, and vectors.py reverses rows.

A tile reads its elements once and writes its results once. The state that enters a tile has one of
two sources: the previous tile in the same program (LOOK_BACK false), or look_back.py. Tiles begin
at multiples of their size from the sequence's beginning, also in a backward scan. Elements past the
sequence's end change no state.

Offsets are 64-bit. Argument names: `x_outer`, `x_length`, `x_inner` are strides in elements.
"""

# ruff: noqa: RET505, RUF005 - Triton compiles what follows a branch although the branch has
# returned, and takes no starred tuples

from __future__ import annotations

import triton
import triton.language as tl

from .combine import apply, combine, edge, lift, read, scan, seed
from .look_back import entering_state, take_ticket
from .vectors import following, preceding, turned

__all__ = ["fold_columns", "fold_rows", "linear_columns", "linear_rows"]

COUNTS = ["chunks", "chains", "tiles"]
"""Arguments that Triton must not specialize, even if they are 1."""


@triton.jit
def _take_work(counter, chains, tiles, LOOK_BACK: tl.constexpr):
    """Return this program's first tile, its chain, and the number of a launch that looks back.

    With LOOK_BACK the program takes a ticket, so all tiles that it looks back to have begun.
    """
    if LOOK_BACK:
        ticket, launch = take_ticket(counter, chains * tiles)
    else:
        ticket, launch = tl.program_id(0), 0
    return ticket // chains, ticket % chains, launch


@triton.jit
def _tile_columns(tile, tiles, REVERSE: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """Return the rows, as (G, R, 1) in scan order, of the tile that is scanned as number `tile`."""
    stretch, within, place = tl.arange(0, G), tl.arange(0, R), tile
    if REVERSE:
        stretch, within, place = G - 1 - stretch, R - 1 - within, tiles - 1 - tile
    return place.to(tl.int64) * (R * G) + (stretch[:, None, None] * R + within[None, :, None])


@triton.jit
def _tile_rows(tile, tiles, REVERSE: tl.constexpr, N: tl.constexpr, V: tl.constexpr):
    """Return the starts of the vectors (N / V) of the tile that is scanned as number `tile`."""
    vector, place = tl.arange(0, N // V), tile
    if REVERSE:
        vector, place = N // V - 1 - vector, tiles - 1 - tile
    return place.to(tl.int64) * N + vector * V


@triton.jit
def _scanned(parts, REVERSE: tl.constexpr, N: tl.constexpr):
    """Return numbers that were loaded as vectors (N / V, V) as (N), in scan order."""
    line = ()
    for i in tl.static_range(len(parts)):
        part = turned(parts[i]) if REVERSE else parts[i]
        line = line + (tl.reshape(part, (N,)),)
    return line


@triton.jit
def _stored(parts, REVERSE: tl.constexpr, N: tl.constexpr, V: tl.constexpr):
    """Return numbers (N) as vectors (N / V, V), in the order of memory."""
    vectors = ()
    for i in tl.static_range(len(parts)):
        part = tl.reshape(parts[i], (N // V, V))
        vectors = vectors + (turned(part) if REVERSE else part,)
    return vectors


@triton.jit
def _spread(state, before, OP: tl.constexpr, G: tl.constexpr):
    """Return the state (G, N) that enters each of a tile's G stretches.

    `before` (N) is the state that enters the tile; `state` are the maps (G, N) from the tile's
    beginning to the end of each stretch.
    """
    group = tl.arange(0, G)[:, None]
    index = tl.broadcast_to(tl.maximum(group - 1, 0), state[0].shape)
    if len(state) == 1:
        maps = (tl.gather(state[0], index, 0),)
    elif len(state) == 2:
        maps = (tl.gather(state[0], index, 0), tl.gather(state[1], index, 0))
    else:
        maps = (
            tl.gather(state[0], index, 0),
            tl.gather(state[1], index, 0),
            tl.gather(state[2], index, 0),
            tl.gather(state[3], index, 0),
        )
    if len(before) == 1:
        outer = (tl.broadcast_to(before[0][None, :], state[0].shape),)
        inner = apply(outer, maps, OP)
        return (tl.where(group == 0, outer[0], inner[0]),)
    else:
        outer = (
            tl.broadcast_to(before[0][None, :], state[0].shape),
            tl.broadcast_to(before[1][None, :], state[0].shape),
        )
        inner = apply(outer, maps, OP)
        return (
            tl.where(group == 0, outer[0], inner[0]),
            tl.where(group == 0, outer[1], inner[1]),
        )


@triton.jit
def _totals(local, OP: tl.constexpr, R: tl.constexpr, G: tl.constexpr):
    """Return the maps (G, N) up to each stretch's end and of the tile (N), from scans (G, R, N)."""
    stretches = edge(local, tl.arange(0, R)[None, :, None] == R - 1, 1)
    running = scan(stretches, 0, OP)
    return running, edge(running, tl.arange(0, G)[:, None] == G - 1, 0)


@triton.jit
def _words(scratch, chain, tiles, N: tl.constexpr, MAPS: tl.constexpr):
    """Return the address of a chain's published maps; the ticket counter precedes all maps."""
    return scratch + 2 + chain.to(tl.int64) * tiles * (MAPS * N)


# --- sums, products, maxima, minima, logaddexp ----------------------------------------------


@triton.jit
def _load_fold(
    address, mask, CAST: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, NEUTRAL: tl.constexpr
):
    value = tl.load(address, mask=mask, other=0).to(CAST).to(ACC)
    return lift(tl.where(mask, value, tl.full([1], NEUTRAL, ACC)), OP)


@triton.jit
def _store_fold(
    y, value, row, length, mask, y_length, EXCLUSIVE: tl.constexpr, REVERSE: tl.constexpr
):
    """Store a tile; an exclusive scan stores the inclusive results shifted by one."""
    if EXCLUSIVE:
        row = row - 1 if REVERSE else row + 1
        mask = mask & (row >= 0) & (row < length)
    tl.store(y + row * y_length, value, mask=mask)


@triton.jit
def _begin_exclusive(
    y, tile, length, y_length, mask, LIKE, OP: tl.constexpr, NEUTRAL: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Store the first result of an exclusive scan: the state that enters the sequence."""
    if tile == 0:
        row = length - 1 if REVERSE else length * 0
        tl.store(y + row * y_length, read(seed(LIKE, OP, NEUTRAL), OP), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def fold_columns(
    x, y, scratch, length, inner, chunks, chains, tiles,
    x_outer, x_length, x_inner, y_outer, y_length, y_inner,
    OP: tl.constexpr, NEUTRAL: tl.constexpr, CAST: tl.constexpr, ACC: tl.constexpr,
    REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, LOOK_BACK: tl.constexpr,
    MAPS: tl.constexpr, FAN: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Scan x to y, both (outer, length, inner); `chunks` chunks of N channels cover `inner`."""
    begin, chain, launch = _take_work(scratch, chains, tiles, LOOK_BACK)
    count = 1 if LOOK_BACK else tiles
    channel = (chain % chunks) * N + tl.arange(0, N)
    inside = channel < inner
    outer = (chain // chunks).to(tl.int64)
    x += outer * x_outer + channel.to(tl.int64)[None, None, :] * x_inner
    y += outer * y_outer + channel.to(tl.int64)[None, None, :] * y_inner
    like = tl.zeros([N], ACC)
    before = seed(like, OP, NEUTRAL)
    for turn in tl.range(0, count, num_stages=STAGES):
        tile = begin + turn
        row = _tile_columns(tile, tiles, REVERSE, R, G)
        mask = (row < length) & inside[None, None, :]
        elements = _load_fold(x + row * x_length, mask, CAST, ACC, OP, NEUTRAL)
        local = scan(elements, 1, OP)
        running, own = _totals(local, OP, R, G)
        if LOOK_BACK:
            before = entering_state(
                _words(scratch, chain, tiles, N, MAPS), launch, before, own, tile, like,
                OP, NEUTRAL, N, MAPS, FAN, LEVELS,
            )  # fmt: skip
        entering = _spread(running, before, OP, G)
        result = _behind(entering, local, OP)
        _store_fold(
            y, result.to(y.dtype.element_ty), row, length, mask, y_length, EXCLUSIVE, REVERSE
        )
        before = apply(before, own, OP)
    if EXCLUSIVE:
        address = y + tl.zeros([1, 1, 1], tl.int64)
        _begin_exclusive(
            address, begin, tl.cast(length, tl.int64), y_length, inside[None, None, :],
            like[None, None, :], OP, NEUTRAL, REVERSE,
        )  # fmt: skip


@triton.jit
def _behind(entering, local, OP: tl.constexpr):
    """Return the results (G, R, N): the local scans combined with the entering states (G, N)."""
    if len(local) == 1:
        return read(combine((entering[0][:, None, :],), local, OP), OP)
    else:
        left = (entering[0][:, None, :], entering[1][:, None, :])
        return read(combine(left, local, OP), OP)


@triton.jit(do_not_specialize=COUNTS)
def fold_rows(
    x, y, scratch, length, chains, tiles,
    x_outer, x_length, y_outer, y_length,
    OP: tl.constexpr, NEUTRAL: tl.constexpr, CAST: tl.constexpr, ACC: tl.constexpr,
    REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, LOOK_BACK: tl.constexpr,
    MAPS: tl.constexpr, FAN: tl.constexpr, LEVELS: tl.constexpr,
    N: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Scan x to y, both (outer, length)."""
    begin, chain, launch = _take_work(scratch, chains, tiles, LOOK_BACK)
    count = 1 if LOOK_BACK else tiles
    x += chain.to(tl.int64) * x_outer
    y += chain.to(tl.int64) * y_outer
    like = tl.zeros([1], ACC)
    before = seed(like, OP, NEUTRAL)
    for turn in tl.range(0, count, num_stages=STAGES):
        tile = begin + turn
        row = _tile_rows(tile, tiles, REVERSE, N, V)[:, None] + tl.arange(0, V)[None, :]
        mask = row < length
        elements = _load_fold(x + row * x_length, mask, CAST, ACC, OP, NEUTRAL)
        local = scan(_scanned(elements, REVERSE, N), 0, OP)
        own = _one(edge(local, tl.arange(0, N) == N - 1, 0))
        if LOOK_BACK:
            before = entering_state(
                _words(scratch, chain, tiles, 1, MAPS), launch, before, own, tile, like,
                OP, NEUTRAL, 1, MAPS, FAN, LEVELS,
            )  # fmt: skip
        line = read(combine(_scalars(before), local, OP), OP)
        result = _stored((line,), REVERSE, N, V)[0].to(y.dtype.element_ty)
        _store_fold(y, result, row, length, mask, y_length, EXCLUSIVE, REVERSE)
        before = apply(before, own, OP)
    if EXCLUSIVE:
        address = y + tl.zeros([1], tl.int64)
        always = tl.arange(0, 1) == 0
        _begin_exclusive(
            address, begin, tl.cast(length, tl.int64), y_length, always, like, OP, NEUTRAL, REVERSE
        )


@triton.jit
def _one(parts):
    """Return scalars as tensors of one element, the form of states."""
    if len(parts) == 1:
        return (parts[0] + tl.zeros([1], parts[0].dtype),)
    elif len(parts) == 2:
        none = tl.zeros([1], parts[0].dtype)
        return (parts[0] + none, parts[1] + none)
    else:
        none = tl.zeros([1], parts[0].dtype)
        return (parts[0] + none, parts[1] + none, parts[2] + none, parts[3] + none)


@triton.jit
def _scalars(state):
    """Return a state of one element as scalars.

    If a one-element tensor were combined with a tile, the tile might get its layout, in which every
    thread holds every element.
    """
    if len(state) == 1:
        return (tl.sum(state[0], 0),)
    else:
        return (tl.sum(state[0], 0), tl.sum(state[1], 0))


# --- h = a*h + b, forwards, and its gradient ------------------------------------------------


@triton.jit
def _load(address, mask, ACC: tl.constexpr, COMPLEX: tl.constexpr):
    """Return the numbers at the addresses, and zeros where the mask is false."""
    real = tl.load(address, mask=mask, other=0).to(ACC)
    if COMPLEX:
        return (real, tl.load(address + 1, mask=mask, other=0).to(ACC))
    else:
        return (real,)


@triton.jit
def _is_inside(row, length, STEP: tl.constexpr):
    """Return whether the next (STEP 1) or previous (STEP -1) row is in the sequence."""
    if STEP == 1:
        return row + 1 < length
    else:
        return row > 0


@triton.jit
def _load_columns(
    x, row, length, x_length, mask, STEP: tl.constexpr, ACC: tl.constexpr, COMPLEX: tl.constexpr
):
    """Return the numbers at `row` + STEP, and zeros outside the mask or the sequence."""
    if STEP == 0:
        return _load(x + row * x_length, mask, ACC, COMPLEX)
    else:
        known = mask & _is_inside(row, length, STEP)
        return _load(x + (row + STEP) * x_length, known, ACC, COMPLEX)


@triton.jit
def _load_beside(
    x, begin, length, x_length, STEP: tl.constexpr,
    ACC: tl.constexpr, COMPLEX: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Return the vectors that start at `begin`, shifted to the next (STEP 1) or previous (-1) rows.

    The function loads unshifted vectors and shifts them in registers, since loads of a shifted
    vector would be one for each number.
    """
    row = begin[:, None] + tl.arange(0, V)[None, :]
    own = _load(x + row * x_length, row < length, ACC, COMPLEX)
    edge = begin + (V - 1 if STEP == 1 else 0)
    known = _is_inside(edge, length, STEP) & (begin < length)
    beside = _load(x + (edge + STEP) * x_length, known, ACC, COMPLEX)
    moved = ()
    for i in tl.static_range(len(own)):
        if STEP == 1:
            moved = moved + (following(own[i], beside[i]),)
        else:
            moved = moved + (preceding(own[i], beside[i]),)
    return moved


@triton.jit
def _factor(parts, mask, GRADIENT: tl.constexpr):
    """Return the factors of a tile's maps; past the sequence's end they are 1.

    For gradients the factors are conjugates, and zeros past the end suffice, as no state enters
    there.
    """
    if GRADIENT:
        if len(parts) == 2:
            return (parts[0], -parts[1])
        else:
            return parts
    else:
        real = tl.where(mask, parts[0], tl.full([1], 1, parts[0].dtype))
        return (real, parts[1]) if len(parts) == 2 else (real,)


@triton.jit
def _from_state(entered, first, known):
    """Return the states that entered the elements, and `first` where `known` is false."""
    filled = ()
    for i in tl.static_range(len(entered)):
        filled = filled + (tl.where(known, entered[i], first[i]),)
    return filled


@triton.jit
def _load_state(address, mask, ACC: tl.constexpr, COMPLEX: tl.constexpr, GIVEN: tl.constexpr):
    """Return the state at an address, or zeros if the caller gave none (GIVEN false)."""
    if GIVEN:
        return _load(address, mask, ACC, COMPLEX)
    else:
        none = tl.zeros(mask.shape, ACC)
        if COMPLEX:
            return (none, none)
        else:
            return (none,)


@triton.jit
def _store_linear(address, state, mask, COMPLEX: tl.constexpr):
    tl.store(address, state[0].to(address.dtype.element_ty), mask=mask)
    if COMPLEX:
        tl.store(address + 1, state[1].to(address.dtype.element_ty), mask=mask)


@triton.jit
def _store_factor_gradient(address, g, entered, mask, COMPLEX: tl.constexpr):
    """Store g times the conjugate of the state that entered the element."""
    if COMPLEX:
        real = g[0] * entered[0] + g[1] * entered[1]
        imaginary = g[1] * entered[0] - g[0] * entered[1]
        _store_linear(address, (real, imaginary), mask, COMPLEX)
    else:
        _store_linear(address, (g[0] * entered[0],), mask, COMPLEX)


@triton.jit(do_not_specialize=COUNTS)
def linear_columns(
    a, b, initial, h, db, da, scratch, length, inner, chunks, chains, tiles,
    a_outer, a_length, a_inner, b_outer, b_length, b_inner, initial_outer, initial_inner,
    h_outer, h_length, h_inner, db_outer, db_length, db_inner, da_outer, da_length, da_inner,
    OP: tl.constexpr, ACC: tl.constexpr, COMPLEX: tl.constexpr, INITIAL: tl.constexpr,
    GRADIENT: tl.constexpr, REVERSE: tl.constexpr, LOOK_BACK: tl.constexpr,
    MAPS: tl.constexpr, FAN: tl.constexpr, LEVELS: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute h = a*h + b along (outer, length, inner). With GRADIENT `b` is the gradient of h, and
    the kernel computes the gradients of b and a by a scan in the other direction.
    """
    begin, chain, launch = _take_work(scratch, chains, tiles, LOOK_BACK)
    count = 1 if LOOK_BACK else tiles
    channel = (chain % chunks) * N + tl.arange(0, N)
    inside = channel < inner
    outer = (chain // chunks).to(tl.int64)
    channel = channel.to(tl.int64)
    a += outer * a_outer + channel[None, None, :] * a_inner
    b += outer * b_outer + channel[None, None, :] * b_inner
    h += outer * h_outer + channel[None, None, :] * h_inner
    initial += outer * initial_outer + channel * initial_inner
    like = tl.zeros([N], ACC)
    first = _load_state(initial, inside, ACC, COMPLEX, INITIAL)
    if GRADIENT:
        db += outer * db_outer + channel[None, None, :] * db_inner
        da += outer * da_outer + channel[None, None, :] * da_inner
        before = seed(like, OP, 0)
    else:
        before = first
    # the row offset of an element's factor
    one: tl.constexpr = 0 if not GRADIENT else 1 if REVERSE else -1
    for turn in tl.range(0, count, num_stages=STAGES):
        tile = begin + turn
        row = _tile_columns(tile, tiles, REVERSE, R, G)
        mask = (row < length) & inside[None, None, :]
        factor = _load_columns(a, row, length, a_length, mask, one, ACC, COMPLEX)
        maps = _factor(factor, mask, GRADIENT) + _load(b + row * b_length, mask, ACC, COMPLEX)
        if GRADIENT:  # asked for before the wait
            entered = _load_columns(h, row, length, h_length, mask, -one, ACC, COMPLEX)
            if INITIAL:
                entered = _from_state(entered, first, _is_inside(row, length, -one))
        running, own = _totals(scan(maps, 1, OP), OP, R, G)
        if LOOK_BACK:
            before = entering_state(
                _words(scratch, chain, tiles, N, MAPS), launch, before, own, tile, like,
                OP, 0, N, MAPS, FAN, LEVELS,
            )  # fmt: skip
        entering = _spread(running, before, OP, G)
        # run the recurrence again, from the state that enters each thread's rows
        begins = tl.arange(0, R)[None, :, None] == 0
        if COMPLEX:
            inner_state = apply((entering[0][:, None, :], entering[1][:, None, :]), maps, OP)
            fed = (
                maps[0],
                maps[1],
                tl.where(begins, inner_state[0], maps[2]),
                tl.where(begins, inner_state[1], maps[3]),
            )
            scanned = scan(fed, 1, OP)
            state = (scanned[2], scanned[3])
        else:
            inner_state = apply((entering[0][:, None, :],), maps, OP)
            fed = (maps[0], tl.where(begins, inner_state[0], maps[1]))
            state = (scan(fed, 1, OP)[1],)
        if GRADIENT:
            _store_linear(db + row * db_length, state, mask, COMPLEX)
            _store_factor_gradient(da + row * da_length, state, entered, mask, COMPLEX)
        else:
            _store_linear(h + row * h_length, state, mask, COMPLEX)
        before = apply(before, own, OP)


@triton.jit(do_not_specialize=COUNTS)
def linear_rows(
    a, b, initial, h, db, da, scratch, length, chains, tiles,
    a_outer, a_length, b_outer, b_length, initial_outer,
    h_outer, h_length, db_outer, db_length, da_outer, da_length,
    OP: tl.constexpr, ACC: tl.constexpr, COMPLEX: tl.constexpr, INITIAL: tl.constexpr,
    GRADIENT: tl.constexpr, REVERSE: tl.constexpr, LOOK_BACK: tl.constexpr,
    MAPS: tl.constexpr, FAN: tl.constexpr, LEVELS: tl.constexpr,
    N: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the same as linear_columns along (outer, length)."""
    begin, chain, launch = _take_work(scratch, chains, tiles, LOOK_BACK)
    count = 1 if LOOK_BACK else tiles
    outer = chain.to(tl.int64)
    a += outer * a_outer
    b += outer * b_outer
    h += outer * h_outer
    like = tl.zeros([1], ACC)
    initial += outer * initial_outer + tl.zeros([1], tl.int64)
    first = _load_state(initial, tl.arange(0, 1) == 0, ACC, COMPLEX, INITIAL)
    if GRADIENT:
        db += outer * db_outer
        da += outer * da_outer
        before = seed(like, OP, 0)
    else:
        before = first
    one: tl.constexpr = 1 if REVERSE else -1  # row offset to the previous element in scan order
    for turn in tl.range(0, count, num_stages=STAGES):
        tile = begin + turn
        vector = _tile_rows(tile, tiles, REVERSE, N, V)
        row = vector[:, None] + tl.arange(0, V)[None, :]
        mask = row < length
        if GRADIENT:
            factor = _load_beside(a, vector, length, a_length, one, ACC, COMPLEX, V)
        else:
            factor = _load(a + row * a_length, mask, ACC, COMPLEX)
        maps = _factor(factor, mask, GRADIENT) + _load(b + row * b_length, mask, ACC, COMPLEX)
        maps = _scanned(maps, REVERSE, N)
        if GRADIENT:  # asked for before the wait
            entered = _load_beside(h, vector, length, h_length, -one, ACC, COMPLEX, V)
            if INITIAL:
                known = _is_inside(row, length, -one)
                entered = _from_state(entered, first, known)
        local = scan(maps, 0, OP)
        own = _one(edge(local, tl.arange(0, N) == N - 1, 0))
        if LOOK_BACK:
            before = entering_state(
                _words(scratch, chain, tiles, 1, MAPS), launch, before, own, tile, like,
                OP, 0, 1, MAPS, FAN, LEVELS,
            )  # fmt: skip
        state = _stored(apply(_scalars(before), local, OP), REVERSE, N, V)
        if GRADIENT:
            _store_linear(db + row * db_length, state, mask, COMPLEX)
            _store_factor_gradient(da + row * da_length, state, entered, mask, COMPLEX)
        else:
            _store_linear(h + row * h_length, state, mask, COMPLEX)
        before = apply(before, own, OP)
