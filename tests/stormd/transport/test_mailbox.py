"""The mailbox: everything once, in order, in batches, from any thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from stormd.transport.mailbox import DELIVERED_A_TURN, Mailbox


def bound(deliver: Callable[[list[Any]], None]) -> Mailbox[Any]:
    mailbox: Mailbox[Any] = Mailbox(asyncio.get_running_loop())
    mailbox.start(deliver)
    return mailbox


async def test_many_results_come_in_several_turns_and_in_their_order() -> None:
    batches: list[list[int]] = []
    mailbox = bound(batches.append)
    everything = list(range(3 * DELIVERED_A_TURN))
    mailbox.post(*everything[:-1])
    await asyncio.sleep(0)
    mailbox.post(everything[-1])
    assert [len(batch) for batch in batches] == [DELIVERED_A_TURN]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [one for batch in batches for one in batch] == everything


async def test_close_delivers_what_waits_and_drops_what_comes_later() -> None:
    batches: list[list[int]] = []
    mailbox = bound(batches.append)
    mailbox.post(*range(3 * DELIVERED_A_TURN))
    mailbox.close()
    mailbox.post(-1)
    mailbox.close()
    await asyncio.sleep(0)
    assert [one for batch in batches for one in batch] == list(range(3 * DELIVERED_A_TURN))
