"""What became of a record's parts between the first Store and the last answer.

What stays true: a record is offloaded when all of its parts have been admitted, and refused for
good with the first that was not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from storm_client.records import StoredRange
from storm_client.stats import StatsRecorder
from stormd.protocol import Stored

__all__ = ["Admission"]


@dataclass(slots=True)
class Admission:
    """What became of one record's parts; outlives the record, for the statistics' sake."""

    record: weakref.ref[StoredRange]
    stats: StatsRecorder
    nbytes: int
    dtype: torch.dtype
    outstanding: int
    admitted: set[int] = field(default_factory=set)
    """Entries of the parts that were: an answer may be handled twice."""
    in_place: bool = False
    refused: bool = False
    early: list[Stored] = field(default_factory=list)
    """Parts that arrived before the last one was admitted: they may yet be given back."""

    def is_answered(self) -> bool:
        """Tell whether the daemon has admitted or refused it."""
        return self.refused or not self.outstanding
