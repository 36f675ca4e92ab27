from __future__ import annotations

from typing import Any

import pytest
import storm_client as storm
import torch
from storm_client.lanes.dtypes import codec_name, dtype_name

UNKNOWN_TO_THE_CODEC = [
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


class SavesBytes(torch.autograd.Function):
    """Saves `x`'s bits as another type."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x.detach().clone().view(torch.uint8).view(dtype))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        return saved.view(torch.uint8).view(torch.float32), None


@pytest.mark.parametrize("dtype", UNKNOWN_TO_THE_CODEC, ids=dtype_name)
def test_a_type_that_the_codec_does_not_know_is_offloaded_as_bytes(
    client: storm.Client, dtype: torch.dtype
) -> None:
    assert codec_name(dtype) == "bytes"
    x = torch.randn(1 << 12, requires_grad=True)
    offload = client.offload(min_bytes=1)
    with offload:
        y = SavesBytes.apply(x, dtype).sum()
    assert offload.stats().offloaded_by_dtype == {dtype_name(dtype): x.nbytes}
    y.backward()
    assert torch.equal(x.grad, x.detach())
