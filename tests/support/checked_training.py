"""Training that knows its right gradients, for tests of what deaths do to it.

What stays true: every step's gradients are compared bit for bit with those of a step without
offload; a step that raises has left no gradient that anybody could take for a right one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import storm_client as storm
import torch
from torch import Tensor, nn

__all__ = ["MIN_BYTES", "Training", "reports"]

LAYERS = 6
SIDE = {"cpu": 128, "cuda": 1024}
"""Width and rows by device: a step takes milliseconds, and more than a staging area of 8 MiB."""

MIN_BYTES = 1 << 14

Report = tuple[float, str]
"""When (of time.monotonic, which all processes share) and what: see `reports`."""


class Training:
    """A model and one batch; `phase` says how far the present step has come."""

    def __init__(self, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        side = SIDE[torch.device(device).type]
        layers = [nn.Sequential(nn.Linear(side, side), nn.GELU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to(device)
        self.phase = "forward"
        self._x = torch.randn(side, side, device=device)
        self._expected = self._step(nullcontext())

    def is_right(self, context: AbstractContextManager[object]) -> bool:
        """Do one step, whose forward is in the context; tell whether its gradients are right."""
        return all(map(torch.equal, self._step(context), self._expected))

    def _step(self, context: AbstractContextManager[object]) -> list[Tensor]:
        self.model.zero_grad(set_to_none=True)
        self.phase = "forward"
        with context:
            loss = self.model(self._x).square().mean()
        self.phase = "backward"
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return [gradient for gradient in gradients if gradient is not None]


def reports(training: Training, address: str, steps: int) -> Iterator[Report]:
    """Train with a daemon; yield "ready", "same" or "different" for each step, then how it ended.

    That is "done", or phase and name of the error: "backward DaemonLost". Standard error gets the
    error's text.
    """
    try:
        with storm.connect(address, embedded="never", timeout=30.0) as client:
            offload = client.offload(training.model, min_bytes=MIN_BYTES)
            yield _now("ready")
            for _ in range(steps):
                yield _now("same" if training.is_right(offload) else "different")
    except storm.StormError as error:
        print(f"{training.phase}: {error}", file=sys.stderr)
        yield _now(f"{training.phase} {type(error).__name__}")
    else:
        yield _now("done")


def _now(word: str) -> Report:
    return time.monotonic(), word
