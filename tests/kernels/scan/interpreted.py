"""Runs the Triton kernels in Triton's interpreter against the reference; TRITON_INTERPRET=1.

Not a test itself: test_kernels.py starts it, because Triton decides when it is imported. Prints a
line a case that is wrong, and how many were right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product

import torch
from storm_kernels.scan import cuda, reference
from storm_kernels.scan.launches import Columns, Rows
from triton.runtime import interpreter

COLUMNS = (
    Columns(4, 2, 8, 1, look_back=True, fan=4),
    Columns(4, 2, 8, 1, look_back=False),
    Columns(2, 1, 4, 1, look_back=True, fan=8),
    None,
)
ROWS = (Rows(8, 1, look_back=True, fan=32), Rows(16, 1, look_back=False), None)
SMALL = Columns(2, 1, 16, 1, look_back=True, fan=2)
COUNTS = (
    *product((SMALL,), (*range(1, 18), 33, 40)),
    *product((Rows(2, 1, look_back=True, fan=32),), (31, 32, 33, 40)),
)
SHAPES = (((1, 29, 5), COLUMNS), ((2, 45), ROWS))
FOLDS = (*((op, False) for op in ("add", "mul", "max", "min", "logaddexp")), ("add", True))
EVERY = 7
"""Only so many cases are run unless --all is asked for; no period of the lists divides it."""

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)


def allow_new_numpy() -> None:
    """NumPy 2.4 turns no array of one element into an index, as this interpreter asks."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def folds() -> Iterator[tuple[object, Callable[[object], tuple[torch.Tensor, ...]]]]:
    for (op, compensated), dtype, (shape, tiles) in product(FOLDS, DTYPES, SHAPES):
        if dtype == torch.int32 and (compensated or op == "logaddexp"):
            continue
        for tile, reverse, exclusive in product(tiles, (False, True), (False, True)):
            if dtype != torch.float32 and (tile is None or exclusive or op not in ("add", "max")):
                continue
            x = torch.randint(-3, 4, shape).to(dtype) if dtype == torch.int32 else (
                torch.randn(shape).to(dtype)
            )  # fmt: skip
            options = {"reverse": reverse, "exclusive": exclusive, "compensated": compensated}

            def run(module, x=x, tile=tile, op=op, options=options):
                y = torch.full_like(x, 7)
                more = {"tile": tile} if module is cuda else {}
                module.fold(x, y, 1, op=op, **options, **more)
                return (y,)

            yield (op, compensated, dtype, shape, tile, reverse, exclusive), run


def recurrences() -> Iterator[tuple[object, Callable[[object], tuple[torch.Tensor, ...]]]]:
    dtypes = (torch.float32, torch.complex64)
    for dtype, (shape, tiles), reverse, state in product(dtypes, SHAPES, (0, 1), (0, 1)):
        for tile in tiles[: 2 if dtype.is_complex else None]:
            a, b, g = (torch.randn(shape).mul(0.6).to(dtype) for _ in range(3))
            initial = torch.randn(shape[:1] + shape[2:]).to(dtype) if state else None

            def run(module, a=a, b=b, g=g, initial=initial, tile=tile, reverse=bool(reverse)):
                h, entered, da, db = (torch.full_like(b, 7) for _ in range(4))
                more = {"tile": tile} if module is cuda else {}
                module.linear(a, b, initial, h, 1, reverse=reverse, **more)
                reference.linear(a, b, initial, entered, 1, reverse=reverse)
                module.linear_gradient(g, a, entered, initial, da, db, 1, reverse=reverse, **more)
                return h, da, db

            yield (dtype, shape, tile, reverse, state), run


def counts() -> Iterator[tuple[object, Callable[[object], tuple[torch.Tensor, ...]]]]:
    """Yield scans of so many tiles, the last of them not full, in up to six levels."""
    ways = tuple(product(FOLDS, (False, True), (False, True)))
    for tile, tiles in COUNTS:
        shape = (1, tile.length * tiles - 1, 3)[: 3 if isinstance(tile, Columns) else 2]
        (op, compensated), reverse, exclusive = ways[tiles % len(ways)]
        dtype = torch.complex64 if tiles % 3 == 0 else torch.float32
        x = torch.randn(shape)
        a, b, g = (torch.randn(shape, dtype=dtype) for _ in range(3))
        options = {"op": op, "reverse": reverse, "exclusive": exclusive}

        def run(module, tile=tile, x=x, a=a, b=b, g=g, options=options, more=compensated):
            y = torch.full_like(x, 7)
            h, entered, da, db = (torch.full_like(b, 7) for _ in range(4))
            given = {"tile": tile} if module is cuda else {}
            reverse = options["reverse"]
            module.fold(x, y, 1, compensated=more, **options, **given)
            module.linear(a, b, None, h, 1, reverse=reverse, **given)
            reference.linear(a, b, None, entered, 1, reverse=reverse)
            module.linear_gradient(g, a, entered, None, da, db, 1, reverse=reverse, **given)
            return y, h, da, db

        yield (tiles, op, dtype, tile, reverse, exclusive), run


def an_infinite_factor_stays_behind() -> bool:
    """Tell whether what precedes an infinite factor is as without it, wherever it lies."""
    a, b = torch.rand(1, 40, 3), torch.randn(1, 40, 3)
    h, expected = torch.empty_like(b), torch.empty_like(b)
    reference.linear(a, b, None, expected, 1, reverse=False)
    for place in (0, 1, 7, 16, 23, 39):
        infinite = a.clone()
        infinite[:, place] = float("inf")
        cuda.linear(infinite, b, None, h, 1, reverse=False, tile=SMALL)
        if not torch.allclose(h[:, :place], expected[:, :place], atol=1e-4):
            return False
    return True


def main() -> None:
    torch.manual_seed(0)
    allow_new_numpy()
    right = 0
    cases = (*folds(), *recurrences(), *counts())
    for case, run in cases if "--all" in sys.argv else cases[::EVERY]:
        for found, expected in zip(run(cuda), run(reference), strict=True):
            tolerance = 3e-2 if found.itemsize == 2 else 1e-4
            size = expected.abs().max().item() if expected.isfinite().all() else 1.0
            if torch.allclose(found, expected, rtol=tolerance, atol=tolerance * max(1.0, size)):
                right += 1
            else:
                print("wrong:", case)
    if not an_infinite_factor_stays_behind():
        print("wrong: an infinite factor")
    print("right:", right)


if __name__ == "__main__":
    sys.exit(main())
