"""What Python runs first in a daemon whose cpu lane is to have the orderings of a device."""

from support.device_lane import DeviceLane

from stormd.lanes import opening

opening.CpuLane = DeviceLane
