"""The store that all ranks of a job share, used so that losing it delays a rank but fails none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

__all__ = ["STORE_SECONDS", "are_several", "own_connection", "within"]

STORE_SECONDS: Final = 5.0
"""The longest time that a rank waits for the store."""

_Result = TypeVar("_Result")


def are_several() -> bool:
    """Return whether this process is one of several ranks."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def own_connection() -> Any:
    """Return our own connection to the job's store, so that no call waits for another user's."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def within(seconds: float, function: Callable[[], _Result]) -> _Result:
    """Return what a function returns, or raise what it raises, within a timeout.

    Raises:
        TimeoutError: it did neither; it goes on in a thread that nobody waits for.
    """
    done: list[_Result] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(function())
        except Exception as error:  # noqa: BLE001 - raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="storm-ranks", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return done[0]
