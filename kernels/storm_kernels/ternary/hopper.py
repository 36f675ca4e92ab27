"""Divides a product with many x into blocks on Hopper: a table and arithmetic, without a GPU.

csrc/cuda/ternary_hopper.cuh has the kernels; cuda.py launches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Final

from .planes import Kind

__all__ = ["CAPABILITY", "MEMORY_BYTES", "SOURCE", "Way", "chosen", "takes", "ways"]

CAPABILITY: Final = (9, 0)
"""Only sm_90a has the warpgroup instructions, and no other device runs sm_90a code."""

SOURCE: Final = "ternary_hopper.cu"
ORDER_THREADS: Final = 128  # kHopperOrderThreads
ORDER_LANES: Final = 4 * 32  # threads that reorder eight x of a span
SPAN_COLUMNS: Final = 512  # kHopperSpan
CHUNKS: Final = 4  # per span
GROUP_THREADS: Final = 128  # kGroupThreads
GROUP_ROWS: Final = 64  # kGroupRows
MAX_STAGES: Final = 8  # kMaxStages
MAX_DEPTH: Final = 5  # PlanesAhead.await_oldest
BARRIER_BYTES: Final = 128  # kBarrierBytes
MEETING_PAD: Final = 4  # kMeetingPad

MEMORY_BYTES: Final = 227 << 10
"""The maximum shared memory of a block."""

SMALL_VALUES: Final = 1 << 23
"""Below this many values w is small: start and end of the kernel dominate the time."""

BATCHES: Final[dict[tuple[Kind, bool], tuple[range, ...]]] = {
    (Kind.INT8, False): (range(9, 513),),
    (Kind.INT8, True): (range(24, 65), range(129, 513)),
    (Kind.BFLOAT16, False): (range(8, 513),),
    (Kind.BFLOAT16, True): (range(4, 513),),
}
"""By kind of x, and whether w is small: the batch sizes for which these kernels measured fastest.

Other batch sizes use the same code as other devices: the kernels of ternary_matmul.cuh, or a dense
product from DENSE_FROM on (cuda.py). At most 512 x were measured.
"""

PROCESSOR_BYTES: Final = 228 << 10
"""Shared memory of a multiprocessor; each block also takes RESERVED_BYTES of it."""
RESERVED_BYTES: Final = 1 << 10

MAX_GROUPS: Final = {2: 4, 3: 4, 4: 4, 6: 4, 8: 4, 12: 2, 16: 2}
"""By eights of x: the warpgroups per block for which the kernel is compiled (ternary_hopper.cu)."""

WARPS: Final = {2: 20, 3: 20, 4: 20, 6: 20, 8: 20, 12: 12, 16: 12}
"""By eights of x: the number of warps for which a multiprocessor has registers."""

BLOCKS: Final = {1: 132, 2: 132, 4: 120, 8: 112}
"""By blocks per cluster: the blocks that an H200 runs at once, one per multiprocessor.

With clusters of 4 and 8 some multiprocessors are idle; 128 blocks in clusters of 4 took two rounds
in measurements.
"""

SPAN_COST: Final = 0.7
BLOCK_COST: Final = 0.2
SPLIT_COST: Final = 0.5
"""The costs of a span, of a block on a shared multiprocessor, and of a doubling of splits. The unit
is the time that one more warpgroup adds to a span. They were fitted to ways measured on an H200."""


@dataclass(frozen=True, order=True)
class Way:
    """One way to launch the kernel.

    A block has `eights` eights of x, `groups` warpgroups of 64 rows, and in shared memory `stages`
    chunks of x and `depth` spans of planes; `splits` blocks share rows. A block that is `alone`
    takes so much shared memory that no other block fits its multiprocessor. (If the kernel begins
    before the kernel that orders x has ended, two blocks may run on one multiprocessor while others
    are idle, which doubles the time.)
    """

    eights: int
    groups: int
    splits: int
    stages: int
    depth: int
    alone: bool = False

    @property
    def rows(self) -> int:
        """The rows of a block."""
        return GROUP_ROWS * self.groups

    @property
    def threads(self) -> int:
        """The threads of a block: the warpgroups that multiply, and one warp that loads x."""
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
    """Return the bytes of planes in flight: per thread and span, 16 bytes of 2 planes of 2 rows."""
    return way.depth * way.groups * GROUP_THREADS * 64


def takes(kind: Kind, rows: int, columns: int, batch: int) -> bool:
    """Return whether these kernels are the fastest for this batch size."""
    numbers = BATCHES[kind, rows * columns < SMALL_VALUES]
    return any(batch in some for some in numbers)


@lru_cache(maxsize=4096)
def chosen(kind: Kind, rows: int, columns: int, batch: int) -> Way:
    """Return the cheapest way for a product."""
    return min(ways(kind, rows, columns, batch))[1]


def ways(kind: Kind, rows: int, columns: int, batch: int) -> list[tuple[float, Way]]:
    """Return all ways to divide a product, as (cost, way); costs are comparable for one product."""
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
    """Return a way with as much data in flight as the work and the memory allow.

    A block processes `spans` spans, and a multiprocessor runs `beside` blocks at once.
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
    """Return the time for blocks of `spans` spans each, with `load` blocks per multiprocessor."""
    at_once, turns = 1.0, 1
    if load > beside:
        at_once, turns = beside, ceil(load / beside)
    elif load > 1:
        at_once = (3 * ceil(load) + load) / 4
    span = SPAN_COST + at_once * (way.groups + BLOCK_COST)
    return turns * spans * span + SPLIT_COST * log2(way.splits)
