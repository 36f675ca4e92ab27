"""A storage of the current step, and the value that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storm_client.eager.events import RecordedValue
    from storm_client.eager.recompute import Result
    from storm_client.eager.sources import PackedInput
    from storm_client.saved.ranges import WeakStorage

__all__ = ["TrackedStorage"]


class TrackedStorage:
    """A storage of the current step, at one version."""

    __slots__ = (
        "before",
        "copied_for",
        "copy",
        "is_overwritten",
        "number",
        "pin",
        "result",
        "value",
        "version",
    )

    def __init__(
        self,
        value: RecordedValue,
        version: int,
        pin: WeakStorage,
        before: TrackedStorage | None = None,
    ) -> None:
        """The storage is `value` as long as it has this version; `pin` refers weakly to it.

        `before` is the value of the storage when it was last looked at; None if it was not.
        """
        self.before = before
        self.value = value
        self.number = value.number
        self.version = version
        self.pin = pin
        self.result: Result | None = None
        self.copy: PackedInput | None = None
        """If no operation made the value: the copy that recipes read instead."""
        self.copied_for = -1
        """The number of the value for whose recipe that copy was made."""
        self.is_overwritten = False
        """Whether its memory was modified uncounted."""
