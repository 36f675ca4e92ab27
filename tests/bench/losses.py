"""What a loss takes, forward and backward: PyTorch's on float32 logits, this one's, and Liger's.

    PYTHONPATH=tests python -m bench.losses --json tests/bench/results/losses.json

Time is that of the loss and its gradient alone, from when the logits are there to when their
gradient is; memory is PyTorch's peak within that beyond what was allocated with the logits. The
ways take turns, and each figure is a median. The logits are dropped before the backward pass, as a
training step can. Of heads the logits are part of what is measured, and the weight's gradient.
What stays true: before it is measured, storm.cross_entropy has the bits of PyTorch's, or the
program ends with an AssertionError. Liger's are there if `liger_kernel` is installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import storm_client as storm
import torch
import torch.nn.functional as F
from bench.recording import parser_of, record
from storm_bench.contenders import seconds_of
from storm_bench.devices import device_here
from support.peak_memory import peak_bytes
from torch import Tensor

SHAPES = {"cuda": [(8192, 32_000), (8192, 128_256)], "cpu": [(512, 32_000)]}
WIDTH = {"cuda": 4096, "cpu": 256}
WARM_UPS = 3

Loss = Callable[..., Tensor]


class Taken(NamedTuple):
    """What one run took."""

    milliseconds: float
    bytes: int
    gradients: tuple[Tensor, ...]
    loss: Tensor


class _Given(torch.autograd.Function):
    """Logits as an operation makes them, at no cost within what is measured."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, values: Tensor, found: list[Tensor]) -> Tensor:
        ctx.found = found
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.found.append(gradient)
        return None, None, None


def of_logits(loss: Loss, values: Tensor, target: Tensor) -> Taken:
    """Run a loss of logits, which it alone holds."""
    found: list[Tensor] = []
    logits = [_Given.apply(torch.ones(1, requires_grad=True), values, found)]
    milliseconds, nbytes, result = _measured(lambda: loss(logits.pop(), target), values.device)
    return Taken(milliseconds, nbytes, tuple(found), result)


def of_head(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> Taken:
    """Run a loss of a head."""
    inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    milliseconds, nbytes, result = _measured(lambda: loss(*inputs, target), hidden.device)
    return Taken(milliseconds, nbytes, tuple(one.grad for one in inputs), result)


def _measured(loss: Callable[[], Any], device: torch.device) -> tuple[float, int, Tensor]:
    """Return the milliseconds of a loss with its backward pass, the most they had, and the loss."""
    results: list[Tensor] = []

    def step() -> None:
        result = loss()
        result = result[0] if isinstance(result, tuple) else result  # some of Liger's versions
        results.append(result.detach())
        result.backward()

    if device.type == "cpu":
        begin = time.perf_counter()
        nbytes = peak_bytes(step)
        return 1e3 * (time.perf_counter() - begin), nbytes, results[0]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = seconds_of(step, "cuda")
    return 1e3 * seconds, torch.cuda.max_memory_allocated() - before, results[0]


def _plain(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _plain_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _plain(F.linear(hidden, weight), target)


def _tiled_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return storm.cross_entropy(F.linear(hidden, weight), target, dtype=torch.float32)


def ways_of_logits(device: str) -> dict[str, Loss]:
    """Return what is compared for logits."""
    ways: dict[str, Loss] = {
        "pytorch": _plain,
        "storm": partial(storm.cross_entropy, dtype=torch.float32),
    }
    if device == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_cross_entropy

        ways["liger"] = liger_cross_entropy
    return ways


def ways_of_head(device: str) -> dict[str, Loss]:
    """Return what is compared for a head."""
    ways: dict[str, Loss] = {
        "pytorch": _plain_head,
        "storm, logits": _tiled_head,
        "storm, head": storm.linear_cross_entropy,
    }
    if device == "cuda" and find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        ways["liger, head"] = liger_fused_linear_cross_entropy
    return ways


def compare(ways: dict[str, Loss], run: Callable[[Loss], Taken], runs: int) -> list[dict[str, Any]]:
    """Return each way's figures, having run them in turns."""
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for number in range(WARM_UPS + runs):
        for name, loss in ways.items():
            one = run(loss)
            if number >= WARM_UPS:
                taken[name].append((one.milliseconds, one.bytes))
    return [
        {
            "way": name,
            "ms": round(statistics.median(ms for ms, _ in found), 3),
            "ms_least": round(min(ms for ms, _ in found), 3),
            "ms_most": round(max(ms for ms, _ in found), 3),
            "bytes": max(nbytes for _, nbytes in found),
        }
        for name, found in taken.items()
    ]


def _check(one: Taken, other: Taken) -> None:
    assert torch.equal(one.loss, other.loss), (one.loss, other.loss)
    for mine, theirs in zip(one.gradients, other.gradients, strict=True):
        assert torch.equal(mine, theirs), "the gradients differ"


def measure(rows: int, classes: int, device: str, runs: int) -> list[dict[str, Any]]:
    """Return the figures of one shape in bfloat16."""
    torch.manual_seed(0)
    target = torch.randint(classes, (rows,), device=device)
    target[::7] = -100
    values = (torch.randn(rows, classes, device=device) * 2).bfloat16()
    ways = ways_of_logits(device)
    _check(*(of_logits(ways[name], values, target) for name in ("pytorch", "storm")))
    figures = compare(ways, partial(of_logits, values=values, target=target), runs)
    found = [{"of": "logits"} | one for one in figures]
    hidden = torch.randn(rows, WIDTH[device], device=device).bfloat16()
    weight = (torch.randn(classes, WIDTH[device], device=device) / 64).bfloat16()
    heads = ways_of_head(device)
    _check(*(of_head(heads[name], hidden, weight, target) for name in ("pytorch", "storm, logits")))
    given = {"hidden": hidden, "weight": weight, "target": target}
    figures = compare(heads, partial(of_head, **given), runs)
    found += [{"of": "head"} | one for one in figures]
    return [{"rows": rows, "classes": classes} | one for one in found]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=tuple(SHAPES), default=device_here())
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    figures = []
    for rows, classes in SHAPES[options.device]:
        figures += measure(rows, classes, options.device, options.runs)
    print(*figures, sep="\n")
    record(options.json, {"figures": figures}, "triton", "liger-kernel")


if __name__ == "__main__":
    main()
