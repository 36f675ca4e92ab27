"""A step of transformers' Trainer with offload, beside a loop of one's own and TRL's offload.

    stormd run --pool-bytes 64GiB --mps on -- python tests/bench/trainer.py \\
        --json tests/bench/results/trainer_h200.json
    stormd run -- python tests/bench/trainer.py --layers 2 --width 256 --tokens 256   # on a CPU

Layers of Llama in the proportions of the one of 8 billion parameters are trained by AdamW, all from
one model: by a loop without offload and with, by a Trainer without offload, with `offload_trainer`,
with checkpointed layers, and with TRL's activation offloading entered where TRL's trainers enter
it. A step lasts from one optimizer's step to the next, by the clock on the wall, the GPU's work
awaited. A row has the median and PyTorch's most allocated bytes of the steps after the warm-ups.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import storm_client as storm
import torch
from framework_models import llama, rows
from recording import parser_of, record
from storm_bench.devices import device_here
from storm_client.integrations.transformers import offload_trainer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

GIB = 1 << 30
WARM_UPS = 6
RATE = 1e-5

Data = list[dict[str, torch.Tensor]]


class Row(NamedTuple):
    """What was measured of one way to train."""

    method: str
    milliseconds: float
    peak_gib: float
    steps_milliseconds: list[float]
    plan: list[str]
    """What offload has decided, where it was on."""


class Steps:
    """Takes the time at the end of each step, and the peak of those that count."""

    def __init__(self, warm_ups: int) -> None:
        self._warm_ups = warm_ups
        self._ends: list[float] = []

    def end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        if len(self._ends) == self._warm_ups and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def row(self, method: str, plan: str) -> Row:
        counted = self._ends[self._warm_ups - 1 :]
        times = [1e3 * (end - begin) for begin, end in pairwise(counted)]
        peak = torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        return Row(method, statistics.median(times), peak, times, plan.splitlines())


class Clock(TrainerCallback):
    """Tells Steps of a Trainer's."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_step_end(self, *_args: Any, **_more: Any) -> None:
        self._steps.end()


class TrlTrainer(Trainer):
    """Enters TRL's context around forward and backward, as TRL's own trainers do."""

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager

        if not hasattr(self, "trl_context"):
            self.trl_context = get_act_offloading_ctx_manager(model)
        with self.trl_context:
            return super().training_step(model, *args, **kwargs)


def loop(
    model: nn.Module, data: Data, arguments: argparse.Namespace, clock: Steps,
    offload: storm.Offload | None = None,
) -> storm.Offload | None:  # fmt: skip
    """Train as a script of one's own does; return the Offload."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model.train()
    for step in range(arguments.steps + WARM_UPS):
        batch = data[step * arguments.rows : (step + 1) * arguments.rows]
        numbers = torch.stack([row["input_ids"] for row in batch]).to(device)
        with offload or nullcontext():
            loss = model(input_ids=numbers, labels=numbers).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end()
    return offload


def trainer(
    model: nn.Module, data: Data, arguments: argparse.Namespace, clock: Steps,
    change: Callable[[Any], Any] | None = None, kind: type[Trainer] = Trainer, **more: Any,
) -> storm.Offload | None:  # fmt: skip
    """Train as transformers does; return the Offload that `change` has given to the Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=arguments.steps + WARM_UPS, learning_rate=RATE,
            per_device_train_batch_size=arguments.rows, lr_scheduler_type="constant",
            max_grad_norm=0.0, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **more,
        )  # fmt: skip
        made = kind(model=model, args=settings, train_dataset=data, callbacks=[Clock(clock)])
        if change is not None:
            change(made)
        made.train()
        return made.storm_offload if change is not None else None


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", default="least")
    parser.add_argument("--methods", nargs="+", help="some of those printed")
    parser.set_defaults(small=False, device=torch.device(device_here()))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = llama(arguments)
    count = (arguments.steps + WARM_UPS) * arguments.rows
    data = rows(argparse.Namespace(**vars(arguments) | {"steps": count}))
    found: list[Row] = []
    with storm.connect() as client:
        for name, train in methods(model, data, arguments, client).items():
            if arguments.methods and name not in arguments.methods:
                continue
            clock = Steps(WARM_UPS)
            offload = train(clock)
            found.append(clock.row(name, "" if offload is None else f"{offload.plan}"))
            model.zero_grad()
            model.gradient_checkpointing_disable()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(f"{name}: {found[-1].milliseconds:.1f} ms, {found[-1].peak_gib:.2f} GiB")
            # after each row: what is cut off has its figures
            figures = {"rows": [one._asdict() for one in found]}
            record(arguments.json, figures, "transformers", "accelerate", "trl")


def methods(
    model: nn.Module, data: Data, arguments: argparse.Namespace,
    client: storm.Client,
) -> dict[str, Callable[[Steps], storm.Offload | None]]:  # fmt: skip
    """Return the ways to train, by name."""
    given = model, data, arguments
    budget = {"budget": arguments.budget}
    found = {
        "loop": lambda clock: loop(*given, clock),
        "loop, stormd": lambda clock: loop(*given, clock, client.offload(model, **budget)),
        "Trainer": lambda clock: trainer(*given, clock),
        "Trainer, stormd": lambda clock: trainer(
            *given, clock, lambda one: offload_trainer(one, client=client, **budget)
        ),
        "Trainer, gradient_checkpointing": lambda clock: trainer(
            *given, clock, gradient_checkpointing=True
        ),
    }
    if torch.cuda.is_available():  # TRL has nothing to offload from without
        found["Trainer, TRL"] = lambda clock: trainer(*given, clock, kind=TrlTrainer)
    return found


if __name__ == "__main__":
    main()
