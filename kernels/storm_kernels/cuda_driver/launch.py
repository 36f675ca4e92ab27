"""Launches kernels by driver calls, which cost the host a few microseconds less than CuPy's.

The driver reads the packed arguments before a launch returns. So one `Arguments` serves all
launches of a thread, one after another; two threads need two.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any

from storm_kernels.cuda_driver.calls import check, driver
from storm_kernels.errors import CudaDriverError

__all__ = ["Arguments", "Function", "current_context", "launch", "launch_early"]

_OVERLAPS = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class Arguments:
    """The named arguments of kernels that are launched together; `kinds` are `struct` formats.

    A launch takes a list of pointers to its arguments. So kernels that take different subsets of
    the arguments share one packed copy.
    """

    def __init__(self, kinds: dict[str, str]) -> None:
        self._places = {name: index for index, name in enumerate(kinds)}
        text = "@" + "".join(kinds.values())
        self._struct = struct.Struct(text)
        self._values = bytearray(self._struct.size)
        # A field ends where a struct of only the fields up to it ends.
        ends = [struct.calcsize(text[: end + 2]) for end in range(len(kinds))]
        sizes = [struct.calcsize(kind) for kind in kinds.values()]
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._values))
        self._fields = [base + end - size for end, size in zip(ends, sizes, strict=True)]
        self._lists: list[ctypes.Array[ctypes.c_void_p]] = []

    def of_kernel(self, *names: str) -> int:
        """Return the address of the list of pointers to these arguments, for `launch`."""
        pointers = [self._fields[self._places[name]] for name in names]
        self._lists.append((ctypes.c_void_p * len(pointers))(*pointers))
        return ctypes.addressof(self._lists[-1])

    def pack(self, *values: int) -> None:
        """Set all arguments, in the order of the kinds."""
        self._struct.pack_into(self._values, 0, *values)


class Function:
    """A kernel that can be launched; the reference to `owner` keeps it loaded."""

    __slots__ = ("_owner", "native", "shared_bytes")

    def __init__(self, handle: int, shared_bytes: int, owner: object) -> None:
        self.native: Any = driver.CUfunction(handle)
        self.shared_bytes = shared_bytes
        self._owner = owner


def current_context() -> int:
    """Return the handle of the calling thread's current context, 0 if it has none.

    Raises:
        CudaDriverError: the driver has not been initialised.
    """
    outcome = driver.cuCtxGetCurrent()
    check(driver.cuCtxGetCurrent, outcome)
    return int(outcome[1])


def launch(function: Function, blocks: int, threads: int, stream: int, arguments: int) -> None:
    """Launch a kernel on a stream of the current context; `arguments` is from `of_kernel`."""
    (status,) = driver.cuLaunchKernel(
        function.native, blocks, 1, 1, threads, 1, 1, function.shared_bytes, stream, arguments, 0
    )
    if status:
        raise _refused("cuLaunchKernel", status, function, blocks, threads)


def launch_early(
    function: Function, blocks: int, threads: int, stream: int, arguments: int, *, cluster: int = 1
) -> None:
    """Launch a kernel that may begin before the previous kernel on the stream has ended.

    On devices of compute capability 9.0 or more it begins when the previous kernel permits it, and
    must wait for that kernel's end itself. (CUDA programming guide, "Programmatic Dependent
    Launch".) Each `cluster` consecutive blocks form one thread block cluster; `cluster` must divide
    `blocks`.
    """
    config = _early(blocks, threads, function.shared_bytes, stream, cluster)
    (status,) = driver.cuLaunchKernelEx(config, function.native, arguments, 0)
    if status:
        raise _refused("cuLaunchKernelEx", status, function, blocks, threads)


@lru_cache(maxsize=4096)
def _early(blocks: int, threads: int, shared_bytes: int, stream: int, cluster: int) -> Any:
    """Return a launch's configuration; all threads share it, so it must not be changed."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = _OVERLAPS
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    config.attrs = [attribute]
    if cluster > 1:
        shape = driver.CUlaunchAttribute()
        shape.id = _CLUSTER
        shape.value.clusterDim.x = cluster
        shape.value.clusterDim.y = shape.value.clusterDim.z = 1
        config.attrs = [attribute, shape]
    config.numAttrs = len(config.attrs)
    return config


def _refused(
    call: str, status: Any, function: Function, blocks: int, threads: int
) -> CudaDriverError:
    about = f"{blocks} blocks of {threads}, {function.shared_bytes} bytes of shared memory"
    return CudaDriverError(call, status.name, about)
