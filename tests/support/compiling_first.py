"""Trains in a process whose first torch.compile is inside of a block, as a script of its own."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import storm_client as storm
import torch
from torch import Tensor


def step(weight: Tensor, context: AbstractContextManager[object]) -> list[Tensor]:
    """Return what a step makes that compiles a function, which has bits of its own then."""
    weight.grad = None
    with context:
        compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * x.sin() * x.cos().tanh())
        loss = compiled(torch.nn.functional.silu(weight * 2)).square().sum()
    loss.backward()
    return [loss.detach(), weight.grad]


def main(address: str) -> None:
    """Compare steps with offload at `address` with one without, and what Dynamo has noticed."""
    assert "torch._dynamo" not in sys.modules
    weight = torch.nn.Parameter(torch.linspace(-3, 3, 1 << 12).view(64, 64))
    own = torch._C._dynamo.eval_frame.set_eval_frame
    with storm.connect(address, embedded="never") as client:
        offload = client.offload(min_bytes=1)
        found = [step(weight, offload) for _ in range(3)]
        expected = step(weight, nullcontext())
    for one in found:
        assert all(map(torch.equal, one, expected))
    from torch._dynamo import eval_frame
    from torch._dynamo.utils import counters

    assert not counters["graph_break"]
    assert torch._C._dynamo.eval_frame.set_eval_frame is own
    assert eval_frame.set_eval_frame is own  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1])
