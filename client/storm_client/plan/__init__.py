"""What becomes of each saved tensor, in which order they come back, and what memory that takes."""

from storm_client.plan.decisions import (
    OFFLOAD,
    REPLAY,
    Decision,
    Keep,
    Offload,
    Replay,
)
from storm_client.plan.order import OrderHistory, Step
from storm_client.plan.window import DeviceWindow

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
