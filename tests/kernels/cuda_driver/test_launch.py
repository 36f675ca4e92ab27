"""Arguments lie where a compiler puts them, and a launch that the device refuses is an error."""

from __future__ import annotations

import ctypes

import pytest
from storm_kernels.errors import CudaDriverError
from support.cuda_only import cuda_only

pytestmark = cuda_only


class Mixed(ctypes.Structure):
    _fields_ = [("a", ctypes.c_uint32), ("b", ctypes.c_uint64), ("c", ctypes.c_uint32)]


def test_each_kernel_is_given_the_arguments_that_it_names() -> None:
    from storm_kernels.cuda_driver.launch import Arguments

    arguments = Arguments({"a": "I", "b": "Q", "c": "I"})
    taken = (ctypes.c_void_p * 3).from_address(arguments.of_kernel("c", "a", "b"))
    arguments.pack(1, 1 << 40, 3)
    start = taken[1]
    assert (taken[0] - start, taken[2] - start) == (Mixed.c.offset, Mixed.b.offset)
    assert ctypes.c_uint32.from_address(taken[0]).value == 3
    assert ctypes.c_uint32.from_address(taken[1]).value == 1
    assert ctypes.c_uint64.from_address(taken[2]).value == 1 << 40


def test_a_launch_that_cannot_be_is_an_error_with_its_size() -> None:
    from storm_kernels.ancf import DType
    from storm_kernels.ancf.cuda_modules import Modules
    from storm_kernels.cuda_driver import PrimaryContext
    from storm_kernels.cuda_driver.launch import Arguments, launch

    context = PrimaryContext(0)
    context.make_current()
    function = Modules(0).function("ancf_decode_begin", DType.BYTES)
    arguments = Arguments(dict.fromkeys("abcde", "Q"))
    arguments.pack(0, 0, 0, 0, 0)
    with pytest.raises(CudaDriverError, match=r"cuLaunchKernel.*1 blocks of 4096"):
        launch(function, 1, 4096, 0, arguments.of_kernel(*"abcde"))
    context.close()
