"""What Python runs first in a daemon that maps a staging area and nothing else."""

from support.mapping_lane import MappingLane

from stormd.lanes import opening


class RefusingLane(MappingLane):
    """Refuses the memory of tensors."""

    refuses = staticmethod(bool)


opening.CpuLane = RefusingLane
