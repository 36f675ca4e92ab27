"""Messages about static plans: what a step stores is said once, and its runs take few messages.

A plan is the sizes and types of the parts that a compiled graph stores whenever it runs, in order.
    RegisterPlan -> PlanRegistered   or  Refused
    RunPlan      -> RunAdmitted      room for the first parts of this run is promised, at once
    StoreParts   -> (no answer for what was promised; Admitted or Rejected for each other part)
                 -> StoredParts      they are encoded, several in one answer
                 or  Failed          one of them came to nothing
    EndRun       -> (no answer)      what was promised and not used is given back
    ForgetPlan   -> (no answer)
The parts of a run are entries like others, numbered from the run's own number on: they are restored
and released as others are, and outlive their run and its plan. RestoreParts asks for several
entries of any kind, and is answered by RestoredParts, or Failed for each that cannot be had.

What is said of each part in every run travels as packed numbers (`pack`), eight bytes each: as
msgpack's they took 2.5 times as long to check and to read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from stormd.protocol.declaring import Message, integer, list_of, message, numbers
from stormd.protocol.errors import ProtocolError
from stormd.protocol.limits import MAX_BATCH, MAX_ENTRY_BYTES, MAX_FEATURES, MAX_PLAN_PARTS
from stormd.protocol.messages import Codec, Id, Text, Texts

__all__ = [
    "RESTORED_FIELDS",
    "RESTORE_FIELDS",
    "STORED_FIELDS",
    "STORE_FIELDS",
    "EndRun",
    "ForgetPlan",
    "PlanRegistered",
    "RegisterPlan",
    "RestoreParts",
    "RestoredParts",
    "RunAdmitted",
    "RunPlan",
    "StoreParts",
    "StoredParts",
    "pack",
    "unpack",
]

STORE_FIELDS: Final = 5
"""Numbers of one part in StoreParts."""

RESTORE_FIELDS: Final = 6
"""Numbers of one part in RestoreParts."""

STORED_FIELDS: Final = 2
"""Numbers of one part in StoredParts."""

RESTORED_FIELDS: Final = 1
"""Numbers of one part in RestoredParts."""

_SIZE = integer(1, MAX_ENTRY_BYTES, f"in 1 .. {MAX_ENTRY_BYTES} bytes")
_KIND = integer(0, MAX_FEATURES - 1, "the place of a type")

Sizes = Annotated[list[int], list_of(_SIZE, MAX_PLAN_PARTS, "sizes")]
Kinds = Annotated[list[int], list_of(_KIND, MAX_PLAN_PARTS, "types")]

StorePlaces = Annotated[bytes, numbers(STORE_FIELDS, MAX_BATCH, "parts")]
RestorePlaces = Annotated[bytes, numbers(RESTORE_FIELDS, MAX_BATCH, "parts")]
StoredPlaces = Annotated[bytes, numbers(STORED_FIELDS, MAX_BATCH, "parts")]
RestoredPlaces = Annotated[bytes, numbers(RESTORED_FIELDS, MAX_BATCH, "parts")]


def pack(values: Sequence[int]) -> bytes:
    """Return the numbers as such messages carry them.

    Raises:
        struct.error: one is not in -2^63 .. 2^63-1.
    """
    return struct.pack(f"<{len(values)}q", *values)


def unpack(places: bytes, fields: int) -> Iterator[tuple[int, ...]]:
    """Return so many numbers for each part; `places` has been checked by its message."""
    return _LAYOUTS[fields].iter_unpack(places)


_LAYOUTS = [struct.Struct(f"<{fields}q") for fields in range(RESTORE_FIELDS + 1)]


# --- from the client ------------------------------------------------------------------------


@message(11, kw_only=True, costly=True)
class RegisterPlan(Message):
    """Describes a plan under a number of the client's choice, that no other has in the session.

    Part i has `sizes[i]` bytes of elements of the type `dtypes[kinds[i]]`; `codec` is for all.
    Answered by PlanRegistered or Refused.
    """

    plan: Id
    sizes: Sizes
    kinds: Kinds
    dtypes: Texts
    codec: Codec

    def check_together(self) -> None:
        """Raise ProtocolError where a part has no size or no type."""
        if len(self.sizes) != len(self.kinds) or not self.sizes:
            raise ProtocolError(
                f"RegisterPlan has {len(self.sizes)} sizes and {len(self.kinds)} types of parts: "
                "send one of each for every part, and at least one part"
            )
        if max(self.kinds) >= len(self.dtypes):
            raise ProtocolError(
                f"RegisterPlan names type {max(self.kinds)} of {len(self.dtypes)}: count from 0"
            )


@message(12)
class ForgetPlan(Message):
    """Takes a plan back; runs of it go on. No answer; unknown plans are passed over."""

    plan: Id


@message(13, kw_only=True)
class RunPlan(Message):
    """Begins a run of a plan; its part i is the entry `run` + i.

    `run` is larger than every entry and run before it in the session. Answered by RunAdmitted, or
    Refused: then the run does not exist, and StoreParts of it are rejected.
    """

    plan: Id
    run: Id


@message(14)
class EndRun(Message):
    """Ends a run: it stores nothing more. No answer; unknown runs are passed over."""

    run: Id


@message(15, kw_only=True)
class StoreParts(Message):
    """Hands parts of a run over.

    `places` has five numbers for each part: its place in the plan, then segment, offset, sequence
    and ready, which mean what they mean in Store. Each part of a run is handed over once.
    """

    run: Id
    places: StorePlaces


@message(23)
class RestoreParts(Message):
    """Asks for several entries, in this order.

    `places` has six numbers for each: ticket, entry, segment, offset, nbytes and sequence, which
    mean what they mean in Restore.
    """

    places: RestorePlaces


# --- from the daemon ------------------------------------------------------------------------


@message(74)
class PlanRegistered(Message):
    """The plan may be run."""

    plan: Id


@message(75)
class RunAdmitted(Message):
    """The pool has promised room for the first `count` parts of the run: these will be stored.

    The others are admitted or rejected one by one when they are handed over.
    """

    run: Id
    count: Id


@message(76)
class StoredParts(Message):
    """These parts of runs are in the arena, as Stored says of one; all got the same `mode`.

    `places` has two numbers for each: entry and stored_bytes.
    """

    places: StoredPlaces
    mode: Text


@message(77)
class RestoredParts(Message):
    """The destination ranges of these tickets, of RestoreParts, hold their verified bytes.

    `places` has one number for each: the ticket.
    """

    places: RestoredPlaces
