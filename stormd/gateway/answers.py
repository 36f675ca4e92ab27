"""Says what clients are told in as few messages as may be; the order stays."""

from __future__ import annotations

from collections.abc import Sequence

from stormd.protocol import Admitted, Envelope, Stored, StoredParts, pack

__all__ = ["joined"]


def joined(answers: Sequence[Envelope]) -> Sequence[Envelope]:
    """Return the answers of one frame, without Admitted of what is Stored in it as well.

    Neighbouring entries that were stored in the same mode are told of in one message.
    """
    stored = {message.entry for _, message in answers if type(message) is Stored}
    if not stored:
        return answers
    made: list[Envelope] = []
    run: list[Stored] = []
    for answer in answers:
        message = answer.message
        if type(message) is Stored:
            if run and run[0].mode != message.mode:
                made.append(_joined(run))
                run = []
            run.append(message)
        elif type(message) is not Admitted or message.entry not in stored:
            if run:
                made.append(_joined(run))
                run = []
            made.append(answer)
    if run:
        made.append(_joined(run))
    return made


def _joined(run: Sequence[Stored]) -> Envelope:
    if len(run) == 1:
        return Envelope(0, run[0])
    numbers = [number for one in run for number in (one.entry, one.stored_bytes)]
    return Envelope(0, StoredParts(pack(numbers), run[0].mode))
