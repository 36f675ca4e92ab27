"""What passes between the ledger and the tier on disk: jobs and their answers.

Plain data with named fields, as what passes between ledger and lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stormd.memory.arena import Block

__all__ = ["ReadJob", "SpillDone", "SpillFailed", "SpillJob", "WriteJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """Write the blob in `block` to `extent`, both of which stay as they are until the answer.

    `generation` is another one for each blob that is written.
    """

    session: int
    entry: int
    generation: int
    block: Block
    extent: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """Read the blob at `extent`, which was written under these three numbers, into `block`."""

    session: int
    entry: int
    generation: int
    block: Block
    extent: Block


SpillJob = WriteJob | ReadJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillDone:
    """What was to be written is on the disk, or what was to be read is in the block, verified.

    `seconds` of work on it, waiting left out.
    """

    session: int
    entry: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillFailed:
    """The tier is of no use any more; what was to be read into may hold anything."""

    session: int
    entry: int
    detail: str
