"""A device is known by its UUID, and its context is the one that PyTorch uses."""

from __future__ import annotations

import pytest
import torch
from storm_kernels.errors import BackendUnavailable
from support.cuda_only import cuda_only

pytestmark = cuda_only


def test_uuids_are_those_that_pytorch_names() -> None:
    from storm_kernels.cuda_driver import device_uuids

    named = [
        str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())
    ]
    assert device_uuids() == named


def test_the_primary_context_reaches_pytorchs_memory() -> None:
    from storm_kernels.cuda_driver import PrimaryContext, buffer_id

    tensor = torch.ones(1 << 20, device="cuda")
    context = PrimaryContext(tensor.get_device())
    context.make_current()
    assert buffer_id(tensor.data_ptr()) > 0
    least, greatest = context.priorities()
    assert greatest <= least
    context.close()
    context.close()
    assert tensor.sum().item() == 1 << 20


def test_a_device_that_is_not_there_is_named() -> None:
    from storm_kernels.cuda_driver import PrimaryContext

    with pytest.raises(BackendUnavailable, match="device 4096 does not exist"):
        PrimaryContext(4096)
