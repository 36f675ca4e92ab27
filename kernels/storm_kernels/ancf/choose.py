"""Chooses the plan for a tensor: a pure function of a small sample (FORMAT.md, sections 9 to 11).

It compares only integers and fixes every order, so all backends choose alike. If the sample does
not represent the rest of the tensor, that costs bytes, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from . import layout
from .layout import Mode
from .plan import DENSE, DROPS, FAST, TERNARY, Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .dtypes import DType

__all__ = ["Sample", "choose", "take_sample"]


def take_sample(elements: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Return at most 16,384 of `elements` (1-D, as unsigned bit patterns), in order."""
    if elements.size <= layout.SAMPLE_MAX:
        return elements
    runs = np.arange(layout.SAMPLE_RUNS, dtype=np.int64)
    last = elements.size // layout.SAMPLE_RUN - 1
    starts = runs * last // (layout.SAMPLE_RUNS - 1) * layout.SAMPLE_RUN
    taken: NDArray[np.unsignedinteger] = elements[
        (starts[:, None] + np.arange(layout.SAMPLE_RUN)).ravel()
    ]
    return taken


def choose(
    sample: Sample, mode: Mode | None, *, dense: bool, policy: str, fill: int | None = None
) -> Plan:
    """Return the plan for the tensor that `sample` was taken from.

    `mode` None chooses among all lossless modes. `fill` is the value that mode sparse omits,
    instead of zero. `policy` is one of options.POLICIES and affects only mode values.
    """
    if fill is not None:
        sample = Sample(sample.elements, sample.dtype, fill)
    if mode is None:
        mode = sample.best_mode(dense=dense)
    if mode in (Mode.WINDOW, Mode.TRUNCATED):
        return sample.window_plan(dense=dense, drop=_forced_drop(sample, mode))
    if mode is Mode.SPARSE:
        return sample.sparse_plan()
    if mode is Mode.CONSTANT:
        return Plan(mode, fill=int(sample.elements[0]))
    if mode in (Mode.TERNARY, Mode.VALUES):
        k1 = TERNARY[0] if mode is Mode.TERNARY else _values_bits(sample, policy)
        return Plan(mode, k1=k1, dictionary=sample.frequent_values((1 << k1) - 1))
    return Plan(mode)


def _forced_drop(sample: Sample, mode: Mode) -> int:
    choices = DROPS.get(sample.dtype.width, ()) if sample.dtype.is_float else ()
    if mode is Mode.WINDOW or not choices:
        return 0
    return sample.drop or choices[0]


def _values_bits(sample: Sample, policy: str) -> int:
    zeros, count = sample.fills, sample.count
    if policy == "aggressive":
        return 9
    if policy == "conservative":
        return 7 if zeros * 10 >= count * 9 else 8
    if zeros * 2 >= count:
        return 7
    return 8 if zeros * 10 >= count else 9


@dataclass(frozen=True)
class _Coding:
    """One way to code elements as symbols, with its cost over the sample in bits."""

    bits: int
    rotate: int
    drop: int
    residue_bits: int
    codes: tuple[int, int]
    dictionary: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """The input of the choice. `elements` are unsigned bit patterns, at least one."""

    elements: NDArray[np.unsignedinteger]
    dtype: DType
    fill: int = 0

    @property
    def count(self) -> int:
        """The number of elements in the sample (N)."""
        return self.elements.size

    @cached_property
    def rest(self) -> NDArray[np.unsignedinteger]:
        """The elements other than `fill`, in the form that a sparse tile codes."""
        elements = self.sparse_elements
        others: NDArray[np.unsignedinteger] = elements[elements != self.fill]
        return others

    @property
    def fills(self) -> int:
        """The number of elements equal to `fill` (Z)."""
        return self.count - int((self.elements != self.fill).sum())

    @cached_property
    def magnitudes(self) -> NDArray[np.unsignedinteger]:
        """The elements without their signs."""
        mask = self.elements.dtype.type((1 << (self.dtype.width - 1)) - 1)
        bare: NDArray[np.unsignedinteger] = self.elements & mask
        return bare

    @cached_property
    def keeps_signs_apart(self) -> bool:
        """Whether all signs get a separate plane, because many zeros are negative.

        The plane costs one bit for each zero. Without it each -0.0 is coded, and costs at least its
        residue.
        """
        if self.fill or not self.dtype.is_float:
            return False
        zeros = int((self.magnitudes == 0).sum())
        return (zeros - self.fills) * (self.dtype.mantissa_bits - self.drop + 1) > zeros

    @property
    def sparse_elements(self) -> NDArray[np.unsignedinteger]:
        """The values that the bitmap compares with `fill`: the elements or their magnitudes."""
        return self.magnitudes if self.keeps_signs_apart else self.elements

    @cached_property
    def drop(self) -> int:
        """The number of low bits that truncation can drop: no sampled element has them set."""
        if not self.dtype.is_float:
            return 0
        low = int(np.bitwise_or.reduce(self.elements))
        candidates = DROPS.get(self.dtype.width, ())
        return next((bits for bits in candidates if not low & ((1 << bits) - 1)), 0)

    @property
    def raw_bits(self) -> int:
        """The bits of the unencoded sample."""
        return self.count * self.dtype.width

    def best_mode(self, *, dense: bool) -> Mode:
        """Return the mode that `mode="auto"` stands for."""
        if self.dtype.name == "BOOL":
            return Mode.BOOLEAN
        if (self.elements == self.elements[0]).all():
            return Mode.CONSTANT
        mode, bits = self._best_float(dense) if self.dtype.is_float else self._best_integer()
        return Mode.SPARSE if self.sparse_bits * 9 < bits * 8 else mode

    def window_plan(self, *, dense: bool, drop: int) -> Plan:
        """Return the plan of mode window, or of mode truncated if `drop` is not 0."""
        coding = self._coding(self.elements, drop, dense=dense)
        return _plan(Mode.TRUNCATED if drop else Mode.WINDOW, coding, 0, 0)

    def sparse_plan(self) -> Plan:
        """Return the plan of mode sparse with this sample's `fill`."""
        signs = layout.BITMAP_SIGNS if self.keeps_signs_apart else 0
        return _plan(Mode.SPARSE, self._rest_coding, self._bitmap[0] | signs, self.fill)

    def frequent_values(self, limit: int) -> tuple[int, ...]:
        """Return the `limit` most frequent elements, the most frequent first."""
        values, counts = np.unique(self.elements, return_counts=True)
        order = np.lexsort((values, -counts))
        return tuple(int(value) for value in values[order[:limit]])

    @property
    def sparse_bits(self) -> int:
        """The cost of mode sparse in bits."""
        signs = self.count if self.keeps_signs_apart else 0
        return self._bitmap[1] + signs + self._rest_coding.bits

    @property
    def integer_width(self) -> int:
        """The bits needed for the differences between the elements and their minimum."""
        signed = self.elements.view(f"i{self.dtype.element_bytes}")
        values = signed if self.dtype.is_signed_integer else self.elements
        return (int(values.max()) - int(values.min())).bit_length()

    def window_bits(self, *, dense: bool) -> int:
        """Return the cost in bits of mode window, or of truncated if low bits can be dropped."""
        return self._coding(self.elements, self.drop, dense=dense).bits

    def _best_integer(self) -> tuple[Mode, int]:
        width = self.integer_width
        if width + 1 < self.dtype.width:
            return Mode.INTEGER, self.count * width
        return Mode.RAW, self.raw_bits

    def _best_float(self, dense: bool) -> tuple[Mode, int]:
        mode, bits = Mode.RAW, self.raw_bits
        window_bits = self.window_bits(dense=dense)
        if window_bits * 65 < self.raw_bits * 64:
            mode, bits = Mode.TRUNCATED if self.drop else Mode.WINDOW, window_bits
        if 2 * self.count < bits and np.unique(self.elements).size <= 3:
            mode, bits = Mode.TERNARY, 2 * self.count
        return mode, bits

    @cached_property
    def _rest_coding(self) -> _Coding:
        if self.keeps_signs_apart:
            return self._cheapest(self.rest, 0, self.drop, DENSE)
        return self._coding(self.rest, self.drop, dense=True)

    @cached_property
    def _bitmap(self) -> tuple[int, int]:
        """The kind of the bitmap, and its size in bits."""
        pairs = (self.sparse_elements != self.fill)[: self.count // 2 * 2].reshape(-1, 2)
        bits = len(pairs) + int(pairs.any(axis=1).sum()) + int(pairs[:, 1].sum())
        if bits * 17 < self.count * 16:
            return layout.BITMAP_PAIRS, bits
        return layout.BITMAP_PLAIN, self.count

    def _coding(self, elements: NDArray[np.unsignedinteger], drop: int, *, dense: bool) -> _Coding:
        codes = DENSE if dense or drop else (FAST,)
        exponent = self._cheapest(elements, 1, drop, codes)
        joint = self._cheapest(elements, 0, drop, codes)
        return joint if joint.bits * 33 < exponent.bits * 32 else exponent

    def _cheapest(
        self,
        elements: NDArray[np.unsignedinteger],
        rotate: int,
        drop: int,
        codes: tuple[tuple[int, int], ...],
    ) -> _Coding:
        ranked = self._rank(elements, rotate, drop)
        codings = [_code(self.dtype, ranked, rotate, drop, pair) for pair in codes]
        return min(codings, key=lambda coding: coding.bits)  # the first of equals

    def _rank(
        self, elements: NDArray[np.unsignedinteger], rotate: int, drop: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the symbols that occur and their counts, the most frequent first."""
        residue_bits = self.dtype.mantissa_bits - drop + rotate
        symbols = _symbols(elements, self.dtype.width - drop, drop, rotate, residue_bits)
        values, counts = np.unique(symbols, return_counts=True)
        order = np.lexsort((values, -counts))
        return values[order], counts[order]


def _code(
    dtype: DType,
    ranked: tuple[NDArray[np.uint64], NDArray[np.int64]],
    rotate: int,
    drop: int,
    codes: tuple[int, int],
) -> _Coding:
    """Return the coding of the `ranked` symbols with codes of these widths, and its cost."""
    symbols, counts = ranked
    residue_bits = dtype.mantissa_bits - drop + rotate
    plan = Plan(Mode.WINDOW, 0, rotate, drop, residue_bits, *codes)
    first, both = plan.slots[0], sum(plan.slots)
    bits = int(counts.sum()) * (residue_bits + plan.k1) + int(counts[first:].sum()) * plan.k2
    bits += int(counts[both:].sum()) * 8 * plan.escape_bytes(dtype)
    dictionary = tuple(int(symbol) for symbol in symbols[:both])
    return _Coding(bits, rotate, drop, residue_bits, codes, dictionary)


def _symbols(
    elements: NDArray[np.unsignedinteger], width: int, drop: int, rotate: int, residue_bits: int
) -> NDArray[np.uint64]:
    wide = elements.astype(np.uint64) >> np.uint64(drop)
    if rotate:
        mask = np.uint64((1 << (width - 1)) - 1)
        return (wide & mask) >> np.uint64(residue_bits - 1)  # the sign is part of the residue
    return wide >> np.uint64(residue_bits)


def _plan(mode: Mode, coding: _Coding, bitmap: int, fill: int) -> Plan:
    return Plan(
        mode, bitmap, coding.rotate, coding.drop, coding.residue_bits, *coding.codes, fill,
        coding.dictionary,
    )  # fmt: skip
