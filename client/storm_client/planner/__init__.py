"""What becomes of each saved tensor, in which order they come back, and what memory that takes."""

from storm_client.planner.decisions import (
    OFFLOAD,
    REPLAY,
    Decision,
    Keep,
    Offload,
    Replay,
)
from storm_client.planner.in_flight import DeviceWindow
from storm_client.planner.order import OrderHistory, Step

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
