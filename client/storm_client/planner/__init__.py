"""Decides for each saved tensor: keep, offload or replay. Also the restore order and the memory.

Everything here is pure, without tensor, device, clock or connection, except that `in_flight.py`
asks GPUs for their memory.
"""

from storm_client.planner.decisions import OFFLOAD, REPLAY, Decision, Keep, Offload, Replay
from storm_client.planner.in_flight import DeviceWindow
from storm_client.planner.prefetch_order import OrderHistory, Step

__all__ = [
    "OFFLOAD",
    "REPLAY",
    "Decision",
    "DeviceWindow",
    "Keep",
    "Offload",
    "OrderHistory",
    "Replay",
    "Step",
]
