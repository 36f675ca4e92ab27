"""How a product with many x is cut into blocks on Hopper: a table, and arithmetic without a GPU.

csrc/cuda/ternary_hopper.cuh has the kernels, cuda.py launches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Final

from .planes import Kind

__all__ = ["CAPABILITY", "MEMORY_BYTES", "SOURCE", "Way", "chosen", "takes", "ways"]

CAPABILITY: Final = (9, 0)
"""Warpgroup instructions are in sm_90a alone, which no other device runs."""

SOURCE: Final = "ternary_hopper.cu"
ORDER_THREADS: Final = 128  # kHopperOrderThreads
ORDER_LANES: Final = 4 * 32  # threads that bring eight x of a span into order
SPAN_COLUMNS: Final = 512  # kHopperSpan
CHUNKS: Final = 4  # of a span
GROUP_THREADS: Final = 128  # kGroupThreads
GROUP_ROWS: Final = 64  # kGroupRows
MAX_STAGES: Final = 8  # kMaxStages
MAX_DEPTH: Final = 5  # PlanesAhead.await_oldest
BARRIER_BYTES: Final = 128  # kBarrierBytes
MEETING_PAD: Final = 4  # kMeetingPad

MEMORY_BYTES: Final = 227 << 10
"""Shared memory that a block can have."""

SMALL_VALUES: Final = 1 << 23
"""Below as many values w is small: the time goes into beginning and ending."""

BATCHES: Final[dict[tuple[Kind, bool], tuple[range, ...]]] = {
    (Kind.INT8, False): (range(9, 513),),
    (Kind.INT8, True): (range(24, 65), range(129, 513)),
    (Kind.BFLOAT16, False): (range(8, 513),),
    (Kind.BFLOAT16, True): (range(4, 513),),
}
"""By kind of x, and whether w is small: how many x these kernels take in the least time measured.

Others go where they go on any device: to the kernels of ternary_matmul.cuh, or from DENSE_FROM on
(cuda.py) to a dense product. No more than 512 were measured.
"""

PROCESSOR_BYTES: Final = 228 << 10
"""Shared memory of a multiprocessor, of which each block also takes RESERVED_BYTES."""
RESERVED_BYTES: Final = 1 << 10

MAX_GROUPS: Final = {2: 4, 3: 4, 4: 4, 6: 4, 8: 4, 12: 2, 16: 2}
"""By eights of x: for how many warpgroups a block the kernel is compiled (ternary_hopper.cu)."""

WARPS: Final = {2: 20, 3: 20, 4: 20, 6: 20, 8: 20, 12: 12, 16: 12}
"""By eights of x: warps for which a multiprocessor has registers."""

BLOCKS: Final = {1: 132, 2: 132, 4: 120, 8: 112}
"""By blocks a cluster: how many an H200 runs at once, one a multiprocessor.

Clusters of 4 and 8 leave some free; 128 blocks in clusters of 4 were measured to take two turns.
"""

SPAN_COST: Final = 0.7
BLOCK_COST: Final = 0.2
SPLIT_COST: Final = 0.5
"""What a span, a block beside others and a doubling of splits take, in the time that one more
warpgroup adds to a span: fitted to ways measured on an H200."""


@dataclass(frozen=True, order=True)
class Way:
    """One way to launch the kernel.

    `eights` of x a block, `groups` warpgroups of 64 rows, `splits` blocks that share rows, `stages`
    chunks of x and `depth` spans of planes in shared memory. A block that is `alone` takes so much
    of it that no other fits beside it. (Two on a multiprocessor while others stand idle happens
    where the kernel begins before the one that orders x has ended, and doubles the time.)
    """

    eights: int
    groups: int
    splits: int
    stages: int
    depth: int
    alone: bool = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return GROUP_ROWS * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block: one warp more than multiply sends for x."""
        return GROUP_THREADS * self.groups + 32

    def shared_bytes(self, kind: Kind) -> int:
        """Return the dynamic shared memory of a block."""
        meeting = 8 * self.eights * (self.rows + MEETING_PAD) * 4
        under_way = self.stages * chunk_bytes(kind, self.eights) + planes_bytes(self)
        needed = BARRIER_BYTES + max(under_way, meeting)
        return max(needed, PROCESSOR_BYTES // 2) if self.alone else needed


def chunk_bytes(kind: Kind, eights: int) -> int:
    """Return the bytes of a chunk of x: 128 columns of all x of a block."""
    return 8 * eights * (SPAN_COLUMNS // CHUNKS) * (1 if kind is Kind.INT8 else 2)


def planes_bytes(way: Way) -> int:
    """Return the bytes that planes on their way take: of two rows 16 bytes of two planes each."""
    return way.depth * way.groups * GROUP_THREADS * 64


def takes(kind: Kind, rows: int, columns: int, batch: int) -> bool:
    """Return whether no other kernels are as fast for so many x."""
    numbers = BATCHES[kind, rows * columns < SMALL_VALUES]
    return any(batch in some for some in numbers)


@lru_cache(maxsize=4096)
def chosen(kind: Kind, rows: int, columns: int, batch: int) -> Way:
    """Return the way for a product."""
    return min(ways(kind, rows, columns, batch))[1]


def ways(kind: Kind, rows: int, columns: int, batch: int) -> list[tuple[float, Way]]:
    """Return all ways to cut a product, each behind its cost; costs of one product compare."""
    eights = next((e for e in MAX_GROUPS if 8 * e >= batch), max(MAX_GROUPS))
    tiles, spans = -(-batch // (8 * eights)), -(-columns // SPAN_COLUMNS)
    found = []
    for groups in (1, 2, 4):
        resident = 2 if 2 * (4 * groups + 1) <= WARPS[eights] else 1
        for splits, room in BLOCKS.items():
            if groups > MAX_GROUPS[eights] or splits > spans:
                continue
            blocks = -(-rows // (GROUP_ROWS * groups)) * tiles * splits
            each = -(-spans // splits)
            load = blocks / room
            beside = 1 if load <= 1 else resident
            way = fitted(kind, eights, groups, splits, each, beside=beside)
            found.append((_cost(way, load, beside, each), way))
    return found


def fitted(
    kind: Kind, eights: int, groups: int, splits: int, spans: int, *, beside: int = 1
) -> Way:
    """Return a way with as much in flight as there is to do and memory for.

    A block has `spans` to do, and a multiprocessor `beside` blocks at once.
    """
    memory = PROCESSOR_BYTES // beside - RESERVED_BYTES
    depth = min(4, spans)
    while True:
        planes = planes_bytes(Way(eights, groups, splits, 0, depth))
        room = (memory - BARRIER_BYTES - planes) // chunk_bytes(kind, eights)
        if room >= min(3, CHUNKS * spans) or depth == 1:
            stages = min(room, MAX_STAGES, CHUNKS * spans)
            return Way(eights, groups, splits, stages, depth, alone=beside == 1)
        depth -= 1


def _cost(way: Way, load: float, beside: int, spans: int) -> float:
    """Return the time of blocks with `spans` to do, `load` of them a multiprocessor."""
    at_once, turns = 1.0, 1
    if load > beside:
        at_once, turns = beside, ceil(load / beside)
    elif load > 1:
        at_once = (3 * ceil(load) + load) / 4
    span = SPAN_COST + at_once * (way.groups + BLOCK_COST)
    return turns * spans * span + SPLIT_COST * log2(way.splits)
