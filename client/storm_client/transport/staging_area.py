"""Opens a session's staging area when something cannot be mapped, for stores and for restores.

Where the daemon works in place, most trainings never need the area, which would take memory of the
device. It is made in three steps, of which an interrupt leaves the first ones done: the lane makes
it, the daemon is offered it as a segment, and once it is mapped `transfers` use it.
"""

from __future__ import annotations

from storm_client.errors import UsageError
from storm_client.lanes import Lane
from storm_client.transport.connection import Connection, send_offers
from storm_client.transport.transfers import Transfers

__all__ = ["open_staging"]


def open_staging(connection: Connection, lane: Lane, transfers: Transfers, end: float) -> bool:
    """Open the staging area unless it is open; return False if the daemon says nothing until `end`.

    Call this without the session's lock.

    Raises:
        UsageError: the device has no memory for the area, or the daemon does not map it.
        DaemonLost: the daemon is gone.
    """
    in_place = lane.in_place
    if transfers.has_staging or in_place is None:
        return True
    area = in_place.make_staging()
    with connection.lock:
        in_place.offer_staging(area.address)
        while in_place.find(area.address, area.nbytes) is None:
            if not in_place.awaits_answer(area.address, area.nbytes):
                raise UsageError("the daemon does not map the staging area; see its log")
            send_offers(connection, in_place.segments)
            if not connection.wait(end):
                return False
        if not transfers.has_staging:
            transfers.open_staging(area.nbytes)
    return True
