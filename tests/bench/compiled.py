"""What offload inside compiled graphs costs, beside what PyTorch offers, at the same time.

    python tests/bench/compiled.py --json tests/bench/results/compiled_llama_h200.json
    python tests/bench/compiled.py --rows 1 --tokens 32768 --blocks
    python tests/bench/compiled.py --layers 2 --width 128 --tokens 256 --steps 3     # on a CPU

transformers' Llama, in the proportions of the one of 8 billion parameters, is compiled as a whole,
or block by block with --blocks, and trained by each method in turn: nothing, checkpointing of every
block, PyTorch's activation_memory_budget, and the backend at several budgets. A row has the median
of the steps' times and the most memory; on a CPU that is the most bytes of saved tensors that the
plan leaves. Beside it stands what the plans expect. With --tiles the step's forward pass is in
`with offload:` too, which computes the loss in tiles. Losses are compared to the bit. On a GPU
Inductor measures which configuration of a reduction is fastest, and another adds in another order:
--deterministic has it choose without measuring, and no kernel of PyTorch's add in any order.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import eq
from typing import NamedTuple

import storm_client as storm
import torch
from framework_models import VOCABULARY, checkpoint, llama
from recording import parser_of, record
from storm_bench.devices import device_here
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from stormd.protocol import budget_text, parse_budget

GIB = 1 << 30
WARM_UPS = 3
PLANNED_WARM_UPS = 60
"""Those in `with offload:`, which compares plans meanwhile."""
BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
MEMORY_BUDGETS = (0.6, 0.4, 0.2)


class Row(NamedTuple):
    """What was measured of one method."""

    method: str
    milliseconds: float
    peak_gib: float
    compile_seconds: float
    same_losses: bool
    expected: dict[str, float]
    """Of the backend's plans, all graphs together: milliseconds, and GiB of saved tensors."""


Wrap = Callable[[nn.Module], nn.Module]


class Method(NamedTuple):
    """How a model is compiled, and in which context."""

    name: str
    wrap: Wrap
    context: AbstractContextManager[object] = nullcontext()
    is_checkpointed: bool = False
    tiles: bool = False
    """Whether the forward pass is in `with offload:`, which computes the loss in tiles."""


def methods(arguments: argparse.Namespace) -> list[Method]:
    plain = torch.compile
    found = [Method("none", plain), Method("checkpoint", plain, is_checkpointed=True)]
    for budget in arguments.memory_budgets:
        patch = functorch_config.patch(activation_memory_budget=budget)
        found.append(Method(f"activation_memory_budget={budget:g}", plain, patch))
    for budget in arguments.budgets:

        def wrap(model: nn.Module, budget: str | float = budget) -> nn.Module:
            return storm.compile(model, budget=budget, min_bytes=arguments.min_bytes)

        found.append(Method(f"stormd budget={budget_text(budget)}", wrap))
        if arguments.tiles:
            found.append(found[-1]._replace(name=f"{found[-1].name}, tiles", tiles=True))
    return [*found, Method("none, again", plain)]


def measure(
    method: Method, arguments: argparse.Namespace, expected: list[float]
) -> tuple[Row, list[float]]:
    """Train by one method; `expected` are the losses of the first."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    device = arguments.device
    model = llama(arguments).train()
    if method.is_checkpointed:
        checkpoint(model)
    compiled: list[nn.Module] = []
    if arguments.blocks:
        blocks = model.model.layers
        compiled = [method.wrap(block) for block in blocks]
        for place, block in enumerate(compiled):
            blocks[place] = block
        call = model
    else:
        compiled = [call := method.wrap(model)]
    # Fused: the temporaries of another would hide what a method saves.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    numbers = torch.randint(VOCABULARY, (arguments.rows, arguments.tokens), device=device)
    losses, seconds = [], []
    offload = storm.offload(model) if method.tiles else nullcontext()
    warm_ups = PLANNED_WARM_UPS if method.tiles else WARM_UPS
    with method.context:
        for step in range(warm_ups + arguments.steps):
            if step == warm_ups and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _synchronize(device)
            began = time.perf_counter()
            with offload:
                loss = call(input_ids=numbers, labels=numbers).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _synchronize(device)
            seconds.append(time.perf_counter() - began)
            losses.append(loss.item())
    peak = (
        torch.cuda.max_memory_allocated() if device.type == "cuda" else _planned(method, compiled)
    )
    row = Row(
        method.name,
        1e3 * statistics.median(seconds[warm_ups:]),
        peak / GIB,
        seconds[0],
        all(map(eq, losses, expected)),
        _expected(method, compiled),
    )
    return row, losses


def _planned(method: Method, compiled: list[nn.Module]) -> int:
    """Return the peak of saved bytes by plan, 0 for what has none."""
    if not method.name.startswith("stormd"):
        return 0
    return sum(plan.peak_bytes for one in compiled for plan in storm.compiled_plans(one))


def _expected(method: Method, compiled: list[nn.Module]) -> dict[str, float]:
    if not method.name.startswith("stormd"):
        return {}
    plans = [plan for one in compiled for plan in storm.compiled_plans(one)]
    kinds = ("forward", "link", "replay", "stall")
    found = {
        f"{kind}_ms": 1e3 * sum(getattr(p, f"{kind}_seconds") for p in plans) for kind in kinds
    }
    return {**found, "peak_gib": sum(plan.peak_bytes for plan in plans) / GIB}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", type=torch.device, default=device_here())
    parser.add_argument("--model", choices=("llama",), default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--min-bytes", type=int, default=1 << 20)
    parser.add_argument("--deterministic", action="store_true", help="equal graphs, equal bits")
    parser.add_argument("--blocks", action="store_true", help="compile block by block")
    parser.add_argument("--tiles", action="store_true", help="also with the loss in tiles")
    budgets = "of the backend: 0.5, 4GiB for all blocks together, least"
    parser.add_argument("--budgets", nargs="*", type=parse_budget, default=BUDGETS, help=budgets)
    parser.add_argument(
        "--memory-budgets", nargs="*", type=float, default=MEMORY_BUDGETS, help="of PyTorch's own"
    )
    parser.set_defaults(small=False)
    arguments = parser.parse_args()
    if arguments.deterministic:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        inductor_config.deterministic = True
    rows: list[Row] = []
    expected: list[float] = []
    print(f"{'method':<32} {'ms':>9} {'peak GiB':>9} {'first s':>8}  losses")
    for method in methods(arguments):
        row, losses = measure(method, arguments, expected)
        expected = expected or losses
        rows.append(row)
        same = "the same" if row.same_losses else "OTHERS"
        print(
            f"{row.method:<32} {row.milliseconds:>9.1f} {row.peak_gib:>9.3f} "
            f"{row.compile_seconds:>8.1f}  {same}",
            flush=True,
        )
        # after each row: what is cut off has its figures
        record(arguments.json, {"rows": [one._asdict() for one in rows]}, "transformers")


if __name__ == "__main__":
    main()
