"""What a step saves: what of it can be recomputed, what can only be offloaded, and what stays.

    PYTHONPATH=tests python -m bench.saved_bytes --json tests/bench/results/saved_bytes.json
    PYTHONPATH=tests python -m bench.saved_bytes llama gpt2 --largest 20

It prints the table of docs/budget.md, a line for each model.

Models of the zoo, small, and others that are written here, each for one step on the cpu lane. A
value is a storage at one version. It can be recomputed if an operation of the table made it, and
whoever cannot be is named by the node that did. What stays does so by the policy, for the reason
that statistics name; parameters, and what is below `--min-bytes`, are not counted. No plan is
looked at: what a plan does with a value depends on the machine.

On a CPU attention with dropout, a mask or heads of two widths saves what the kernels of a GPU do
not. Models whose package is missing are said to be.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import storm_client as storm
import torch
from bench.recording import parser_of, record
from bench.saved_models import MODELS, SMALL
from storm_bench.child_daemon import ChildDaemon
from storm_bench.zoo.models import WORKLOADS, Workload
from storm_client.planner import Keep
from storm_client.planner.decisions import NO_ACTIVATIONS
from storm_client.policy import Policy
from torch import Tensor

ZOO = ("llama", "lora", "moe", "fp32amp", "gpt2", "bert")
"""Of the zoo what is small enough for a CPU; the others have a twin among the models here."""

MIN_BYTES = 2048
"""What is as large beside the zoo's small models as 1 MiB beside those of a GPU."""

_REASONS = {
    "no operation": "of no node",
    "SafeSoftmaxBackward0": "attention's weights",
    "ReshapeAliasBackward0": "reshape",
}
"""What the table calls what no operation recomputes, where it is not the node that made it."""

_UNCOUNTED = NO_ACTIVATIONS - {"leaf"} | {"small"}


class Saved(NamedTuple):
    """What a step of a model saves, in bytes."""

    total: int
    recomputable: int
    offloadable: Counter[str]
    """What can be offloaded and not recomputed, by the node that made it."""
    staying: Counter[str]
    """By the reason."""

    def row(self, largest: int) -> dict[str, Any]:
        """Return shares of the total, in percent; of what can only be offloaded the largest."""
        return {
            "saved_mib": round(self.total / 2**20, 2),
            "recomputable": self.percent(self.recomputable),
            "offloadable": self.percent(self.offloadable.total()),
            "staying": self.percent(self.staying.total()),
            "offloadable_by": {
                name: self.percent(n) for name, n in self.offloadable.most_common(largest)
            },
            "staying_by": {name: self.percent(n) for name, n in self.staying.items()},
        }

    def percent(self, nbytes: int) -> float:
        return round(100 * nbytes / max(self.total, 1), 1)


def measured(work: Workload, client: storm.Client, min_bytes: int = MIN_BYTES) -> Saved:
    """Return what a step saves."""
    model = work.model.train()
    policy, staying, stored = Policy([model], min_bytes), Counter[str](), set[int]()

    def look(tensor: Tensor) -> Tensor:
        decision = policy.decide(tensor)
        if isinstance(decision, Keep) and decision.reason not in _UNCOUNTED:
            address = tensor.untyped_storage()._cdata
            if address not in stored:
                stored.add(address)
                staying[decision.reason] += tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor),
        torch.autocast("cpu", work.autocast, enabled=work.autocast is not None),
    ):
        loss = work.loss(model)
    del loss
    offload = client.offload(model, min_bytes=min_bytes)
    with offload, torch.autocast("cpu", work.autocast, enabled=work.autocast is not None):
        loss = work.loss(model)
    loss.backward()
    signature = offload._planning._signatures.latest
    saved = [value for value in signature.values if value.is_saved]
    offloadable = Counter[str]()
    for value in saved:
        if not value.operation:
            offloadable[value.made_by or "no operation"] += value.nbytes
    return Saved(
        sum(value.nbytes for value in saved) + staying.total(),
        sum(value.nbytes for value in saved if value.operation),
        offloadable,
        staying,
    )


def makers() -> dict[str, Callable[[], Workload]]:
    """Return how to make each model."""
    return {**{name: partial(WORKLOADS[name], SMALL) for name in ZOO}, **MODELS}


def main() -> None:
    """Measure as the arguments say."""
    every = makers()
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(every)}; all of them by default")
    parser.add_argument("--min-bytes", type=int, default=MIN_BYTES)
    parser.add_argument("--largest", type=int, default=3, help="nodes to name")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with (
        ChildDaemon(flags=["--pool-bytes=4GiB", "--device=cpu"]) as daemon,
        storm.connect(daemon.address, embedded="never", timeout=60.0) as client,
    ):
        for name in args.models or every:
            torch.manual_seed(0)
            try:
                row = measured(every[name](), client, args.min_bytes).row(args.largest)
            except ImportError as error:
                row = {"missing": str(error)}
            rows[name] = row
            sys.stdout.write(f"{line(name, row)}\n")
            sys.stdout.flush()
    record(args.json, {"rows": rows}, "transformers", "peft")


def line(name: str, row: dict[str, Any]) -> str:
    """Return a row of the table in Markdown."""
    if "missing" in row:
        return f"| {name} | | | | {row['missing']} |"
    reasons = [
        f"{_REASONS.get(by, by.removesuffix('Backward0'))} {percent}"
        for key in ("offloadable_by", "staying_by")
        for by, percent in row[key].items()
        if percent
    ]
    shares = f"{row['recomputable']} | {row['offloadable']} | {row['staying']}"
    return f"| {name} | {shares} | {', '.join(reasons)} |"


if __name__ == "__main__":
    main()
